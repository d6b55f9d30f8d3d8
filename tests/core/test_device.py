"""Devices and threads."""

from __future__ import annotations

import pytest
import torch

from fedsim.core.device import resolve_device, threads
from fedsim.core.errors import SpecError


@pytest.mark.parametrize(("there", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_the_gpu_where_there_is_one(
    there: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    assert resolve_device("auto") == torch.device(device)


def test_a_device_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(SpecError, match="'cuda:1', but torch sees no GPU"):
        resolve_device("cuda:1")
    with pytest.raises(SpecError, match="torch knows no device 'abacus'"):
        resolve_device("abacus")


def test_threads_are_as_they_were_afterwards() -> None:
    before = torch.get_num_threads()

    def fails() -> None:
        with threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert torch.get_num_threads() == before

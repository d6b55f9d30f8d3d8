"""Sent: each tensor that somebody was sent in place of the round's is stored once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedsim.core.errors import ObservationError
from fedsim.core.run import sent_path
from fedsim.core.sent import Places, Shelf, files_of, read_sent


def test_a_tensor_is_stored_once_whoever_received_it(tmp_path: Path) -> None:
    shelf, head = Shelf(tmp_path), torch.rand(3, 4)
    first = shelf.store({"head": head, "bias": torch.zeros(3)})
    same = shelf.store({"head": head.clone(), "bias": torch.zeros(3)})
    third = shelf.store({"head": head, "bias": torch.ones(3)})
    assert first == same
    assert (first.files, third.files) == ({"head": 1, "bias": 1}, {"head": 1, "bias": 2})
    assert [file.name for file in files_of(tmp_path, third)] == [
        *("sent-0001.safetensors", "sent-0002.safetensors")
    ]
    assert {file.name for file in tmp_path.iterdir()} == {f.name for f in files_of(tmp_path, third)}
    found = read_sent(tmp_path, third)
    assert torch.equal(found["head"], head)
    assert torch.equal(found["bias"], torch.ones(3))


def test_equal_numbers_under_another_name_are_another_tensor(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    both = shelf.store({"a": torch.zeros(2)}), shelf.store({"b": torch.zeros(2)})
    assert [read_sent(tmp_path, places).keys() for places in both] == [{"a"}, {"b"}]


def test_nothing_was_changed_and_nothing_is_read(tmp_path: Path) -> None:
    assert Shelf(tmp_path).store({}).files == {}
    assert read_sent(tmp_path, Places()) == {}
    assert not list(tmp_path.iterdir())


def test_damage_to_what_was_sent_is_told(tmp_path: Path) -> None:
    places = Shelf(tmp_path).store({"head": torch.rand(3)})
    lying = Places(files=places.files, checksum="0" * 16)
    with pytest.raises(ObservationError, match="checksum is not the recorded one"):
        read_sent(tmp_path, lying)
    path = sent_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ObservationError, match=r"sent-0001\.safetensors' is damaged"):
        read_sent(tmp_path, places)
    path.unlink()
    with pytest.raises(ObservationError, match="is missing"):
        read_sent(tmp_path, places)

"""The recorder: what the server saw is on disk, or the run stops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedsim.audit.stages import federate
from fedsim.core.learning import Update
from tests.conftest import small_spec


def test_updates_that_do_not_fit_in_memory_are_read_back(tmp_path: Path, monkeypatch) -> None:
    held = federate(small_spec("audit.rounds=[2]"), tmp_path / "held")
    monkeypatch.setattr("fedsim.federation.recorder.HELD_BYTES", 1)
    spilled = federate(small_spec("audit.rounds=[2]"), tmp_path / "spilled")
    first, second = (load_file(run.checkpoint) for run in (held, spilled))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not (spilled.root / "spool").exists()


def test_an_error_of_the_writer_stops_the_run(tmp_path: Path, monkeypatch) -> None:
    def full(root: Path, round_: int, client: int, update: Update, *about: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedsim.federation.recorder.write_observation", full)
    with pytest.raises(OSError, match="No space left"):
        federate(small_spec(), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()

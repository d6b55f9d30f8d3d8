"""Checkpoints: rounds, model and the strategy's memory in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM

from fedsim.core.errors import RunError
from fedsim.core.files import read_tensors, save_tensors
from fedsim.core.run import Run
from fedsim.federation.checkpoint import (
    Checkpoint,
    held_by,
    read_checkpoint,
    restore,
    write_checkpoint,
)

ROWS: list[dict[str, Any]] = [{"round": 1, "clients": 2, "train_loss": 0.5}, {"round": 2}]


def test_a_new_run_got_nowhere(tmp_path: Path) -> None:
    assert read_checkpoint(Run(tmp_path)) == Checkpoint([], {}, {})


def test_what_was_written_is_read_and_the_rounds_are_a_table(tmp_path: Path) -> None:
    run, memory = Run(tmp_path), {"m_t/head": torch.ones(2)}
    write_checkpoint(run, Checkpoint(ROWS, {"head": torch.arange(3.0)}, memory))
    found = read_checkpoint(run)
    assert found.rows == ROWS
    assert found.arrays.keys() == {"head"}
    assert torch.equal(found.arrays["head"], torch.arange(3.0))
    assert torch.equal(found.state["m_t/head"], torch.ones(2))
    assert list(run.rounds["round"]) == [1, 2]


@pytest.mark.parametrize("rounds", ['[{"round": 2}]', "[{}]", "{", '[{"round": 1}, {"round": 1}]'])
def test_rounds_that_are_not_counted_are_damage(tmp_path: Path, rounds: str) -> None:
    run = Run(tmp_path)
    save_tensors(run.checkpoint, {"head": torch.ones(1)}, {"rounds": rounds})
    with pytest.raises(RunError, match=r"is damaged.*--resume"):
        read_checkpoint(run)


@pytest.mark.parametrize("kind", [FedAdam, FedAvgM])
def test_a_strategy_is_given_back_what_it_remembers(tmp_path: Path, kind: type) -> None:
    moments = {
        FedAdam: {"m_t": {"head": np.ones(2)}, "v_t": {"head": np.full(2, 3.0)}},
        FedAvgM: {"momentum_vector": [np.ones(2), np.full(3, 2.0)]},
    }[kind]
    strategy, fresh = kind(), kind()
    for name, value in moments.items():
        setattr(strategy, name, value)
    run = Run(tmp_path)
    write_checkpoint(run, Checkpoint([], {}, held_by(strategy)))
    restore(fresh, read_checkpoint(run).state)
    for name, value in moments.items():
        found = getattr(fresh, name)
        assert type(found) is type(value)
        np.testing.assert_equal(found, value)


def test_a_strategy_without_a_memory_adds_nothing_to_the_file(tmp_path: Path) -> None:
    run = Run(tmp_path)
    write_checkpoint(run, Checkpoint([], {"head": torch.ones(1)}, held_by(FedAvg())))
    assert read_tensors(run.checkpoint)[0].keys() == {"head"}


@pytest.mark.parametrize("attribute", ["aggregate_train", "__class__", "current_arrays", "eta"])
def test_a_file_gives_a_strategy_nothing_but_its_memory(attribute: str) -> None:
    strategy = FedAdam()
    before = dict(vars(strategy))
    with pytest.raises(RunError, match=f"holds a '{attribute}', and a FedAdam does not"):
        restore(strategy, {f"{attribute}/head": torch.ones(2)})
    assert vars(strategy) == before

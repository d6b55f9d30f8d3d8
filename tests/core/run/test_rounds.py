"""Rounds: told by the checkpoint, and by a table that is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedsim.core.errors import DamagedError
from fedsim.core.files import save_tensors
from fedsim.core.run import ROUND_COLUMNS, Run
from fedsim.core.run.rounds import read_rounds, rows_in

ODD = {
    "another table": "a,b\n1,2\n",
    "words for numbers": f"{','.join(ROUND_COLUMNS)}\n1,x,y,z,1,1,1,1\n",
    "rounds that are not counted": "round,test_accuracy\n2,0.5\n",
    "a column twice": "round,round,bytes\n1,1,1\n",
    "nothing": "",
    "bytes": "\x00\xff",
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD.keys())
def test_a_table_that_is_none_is_damage_and_the_checkpoint_is_believed(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "rounds.csv").write_bytes(text.encode("latin-1"))
    if not text.startswith("round,round"):
        with pytest.raises(DamagedError, match="is damaged"):
            read_rounds(tmp_path)
    rounds = '[{"round": 1, "test_accuracy": 0.5}, {"round": 2, "test_accuracy": null}]'
    save_tensors(tmp_path / "checkpoint.safetensors", {"x": torch.ones(1)}, {"rounds": rounds})
    table = Run(tmp_path).rounds
    assert table["round"].tolist() == [1, 2]
    assert table["test_accuracy"].dropna().tolist() == [0.5]
    assert list(table) == list(ROUND_COLUMNS)


def test_without_a_checkpoint_the_table_serves(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_rounds(tmp_path)
    (tmp_path / "rounds.csv").write_text("round,bytes\n1,20\n2,30\n")
    assert read_rounds(tmp_path)["bytes"].tolist() == [20, 30]


@pytest.mark.parametrize("rounds", ['[{"round": 2}]', "[{}]", "{", '[{"round": "one"}]'])
def test_rounds_that_are_not_counted_are_damage(rounds: str) -> None:
    with pytest.raises(DamagedError):
        rows_in({"rounds": rounds})

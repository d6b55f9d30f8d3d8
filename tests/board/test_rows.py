"""Rows: seeds are pooled, pictures count once, and what is beaten is marked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from fedsim.board.entries import read_entries
from fedsim.board.page import Built
from fedsim.board.pictures import triples_of
from fedsim.board.rows import Row, rows_of
from fedsim.core.files import write_json
from fedsim.core.run import Run
from tests.board.conftest import made


def by_defense(rows: list[Row], letter: str = "C") -> dict[str, Row]:
    """The rows of a threat by defense and strength."""
    return {
        f"{row.defense} {row.strength}".strip(): row
        for row in rows
        if row.federation.letter == letter
    }


def test_a_row_says_what_the_closest_member_made_of_every_picture(built: Built) -> None:
    plain = by_defense(built.rows)["none"]
    assert (plain.numbers["psnr"], plain.numbers["psnr_picture"]) == (160, 160)
    assert (plain.numbers["recovered"], plain.numbers["labels"]) == (1, 1)
    assert plain.numbers["picked_psnr"] < 15  # its attacker would have picked the other one
    assert plain.worst_by == [("close", 2)]
    assert plain.picked_by == [("far", 2)]
    assert (plain.kept, plain.accuracy, plain.suite) == (1, 0.6, "standard-1")


def test_what_leaks_more_and_learns_less_is_beaten(built: Built) -> None:
    rows = by_defense(built.rows)
    beaten = {name for name, row in rows.items() if row.dominated}
    assert beaten == {"none", "gaussian_noise std 0.3 relative"}


def test_a_number_in_doubt_beats_nobody(built: Built) -> None:
    entries = [entry for row in built.rows for entry in row.entries]
    sure = by_defense(rows_of([replace(entry, flags=[]) for entry in entries]))
    doubted = by_defense(built.rows)["quantization kind sign"]
    assert doubted.flags
    assert not doubted.dominated
    assert sure["top_k sparsity 0.9"].dominated  # by the one that is in doubt above
    assert not by_defense(built.rows)["top_k sparsity 0.9"].dominated


def test_accuracy_is_told_beside_that_of_the_undefended(built: Built) -> None:
    rows = by_defense(built.rows)
    assert rows["gaussian_noise std 0.3 relative"].kept == pytest.approx(0.5)
    assert by_defense(built.rows, "D")["none"].kept == 1


def test_seeds_are_pooled_and_a_picture_that_both_met_counts_once(
    shelf: dict[str, Run], tmp_path: Path
) -> None:
    other = made(tmp_path / "other", 0.1, 0.4, seed=1)  # on the same pictures
    entries, _, _ = read_entries([shelf["plain"].root, other.root])
    (row,) = rows_of(entries)
    assert (row.seeds, row.pictures, row.victims) == (2, 2, 4)
    assert 20 < (row.numbers["psnr"] or 0) < 160  # the mean of both meetings
    assert row.numbers["recovered"] == 1  # it came back once
    assert row.numbers["psnr_client"] == 160
    assert row.accuracy == pytest.approx(0.5)
    assert len(row.specs) == 2


def test_where_nothing_can_be_picked_by_nothing_was_picked(tmp_path: Path) -> None:
    run = made(tmp_path / "run", 0.1)
    table = pd.read_csv(run.root / "envelope.csv")
    run.write_table("envelope", table.assign(**{n: None for n in table if n.startswith("picked")}))
    (row,) = rows_of(read_entries([run.root])[0])
    assert row.picked_by == []
    assert row.numbers["picked_psnr"] is None
    triples, why = triples_of(row)
    assert why is None
    assert [one.picked for one in triples] == [None, None]


def test_the_labels_are_those_of_the_member_that_named_most(tmp_path: Path) -> None:
    run = made(tmp_path / "run", 0.1)
    summary = run.summary
    summary["suite"]["envelope"] = {"labels": 0.25}
    write_json(run.summary_path, summary)
    (row,) = rows_of(read_entries([run.root])[0])
    assert row.numbers["labels"] == 0.25


def test_other_versions_of_the_suite_are_other_rows(shelf: dict[str, Run], tmp_path: Path) -> None:
    harder = made(tmp_path / "harder", 0.1, seed=1, suite={"exhaustive": True})
    entries, _, _ = read_entries([shelf["plain"].root, harder.root])
    assert {row.suite for row in rows_of(entries)} == {"standard-1", "standard-1, exhaustive"}

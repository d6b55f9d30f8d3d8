"""Rules of entry: what stands on the board, what is marked, what is refused and why."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from fedsim.board.entries import read_entries
from fedsim.core.files import write_json
from fedsim.core.run import Run
from tests.board.conftest import WEAK, made


def _why(root: Path, **options: bool) -> str:
    entries, refused, _ = read_entries([root], **options)
    assert not entries
    return refused[0].why


@pytest.fixture
def run(shelf: dict[str, Run], tmp_path: Path) -> Run:
    shutil.copytree(shelf["plain"].root, tmp_path / "run")
    return Run.open(tmp_path / "run")


def _forget_suite(run: Run) -> None:
    write_json(run.summary_path, {k: v for k, v in run.summary.items() if k != "suite"})


def _another_suite(run: Run) -> None:
    write_json(run.summary_path, {**run.summary, "suite": {"version": "<b>mine</b>"}})


def _other_scores(run: Run) -> None:
    run.write_table("scores", run.scores.head(3))


def _short_envelope(run: Run) -> None:
    table = pd.read_csv(run.root / "envelope.csv")
    table.head(1).to_csv(run.root / "envelope.csv", index=False)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_forget_suite, "was not attacked by the standard suite"),
        (_another_suite, "is no standard one"),
        (_other_scores, "it is not concluded"),
        (lambda run: run.summary_path.unlink(), "it is not concluded"),
        (lambda run: (run.root / "envelope.csv").unlink(), "no picture of it was scored"),
        (lambda run: (run.root / "envelope.csv").write_text("a,b\n1,2\n"), "is damaged"),
        (_short_envelope, "is not of its scores"),
        (lambda run: shutil.rmtree(run.root), "holds no run"),
    ],
)
def test_a_run_that_shows_nothing_is_refused_in_a_sentence(
    run: Run, change: Callable[[Run], None], why: str
) -> None:
    change(run)
    assert why in _why(run.root)


def test_a_run_of_foreign_code_is_refused_until_it_is_trusted(tmp_path: Path) -> None:
    run = made(tmp_path / "run", 0.1, model={"name": "somebody.elses:Net"})
    assert "add --trust" in _why(run.root)
    assert len(read_entries([run.root], trust=True)[0]) == 1


def test_the_same_run_enters_once(run: Run, shelf: dict[str, Run]) -> None:
    entries, refused, _ = read_entries([shelf["plain"].root, run.root])
    assert len(entries) == 1
    assert "on the board already" in refused[0].why


def test_what_puts_a_number_in_doubt_is_a_flag(tmp_path: Path) -> None:
    wrong = made(tmp_path / "wrong", 0.45, canary=0.5)
    lacking = made(tmp_path / "lacking", 0.1, seed=5)
    summary = lacking.summary
    summary["verdicts"][0]["lacking"] = "1 of 2 victims could not be scored"
    write_json(lacking.summary_path, summary)
    entries, refused, _ = read_entries([wrong.root, lacking.root])
    assert not refused
    flags = [[flag.flag for flag in entry.flags] for entry in entries]
    assert flags == [["canary"], ["incomplete"]]
    assert "1 of 2 victims" in entries[1].flags[0].words


def test_true_labels_are_another_threat(tmp_path: Path, shelf: dict[str, Run]) -> None:
    helped = made(tmp_path / "run", 0.0, threat={"model": "C", "oracle_labels": True})
    entries, refused, _ = read_entries([helped.root, shelf["plain"].root])
    assert not refused
    assert entries[0].federation.key != entries[1].federation.key
    assert entries[0].federation.threat == "C with the true labels"


def test_the_strongest_attack_on_membership_counts(shelf: dict[str, Run]) -> None:
    entries, _, _ = read_entries([shelf["plain"].root, shelf["weak"].root])
    assert entries[0].membership == pytest.approx({"auc": 0.7, "low": 0.6, "high": 0.8})
    assert entries[1].membership is None


def test_every_cell_of_a_bench_is_an_entry_with_the_cost_that_the_bench_measured(
    tmp_path: Path,
) -> None:
    bench = tmp_path / "bench"
    made(bench / "cells" / "none-seed-0", 0.0, name="none")
    made(bench / "cells" / "noise-seed-0", 0.1, name="gaussian_noise std 0.001", defenses=WEAK)
    write_json(bench / "bench.json", {"spec": {}, "bench": {}})
    assert "cells.csv" in _why(bench)
    rows = [
        {"defense": "none", "strength": None, "seed": 0, "accuracy": 0.8, "upload_bytes": 2048.0},
        {"defense": "gaussian_noise", "strength": "std 0.001", "seed": 0, "accuracy": 0.6,
         "upload_bytes": 1024.0, "epsilon": 7.5},
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(bench / "cells.csv", index=False)
    entries, refused, _ = read_entries([bench])
    assert not refused
    costs = {entry.defense: entry.cost for entry in entries}
    assert (costs["none"].accuracy, costs["none"].upload_bytes) == (0.8, 2048)
    noise = costs["gaussian_noise"]
    assert (noise.accuracy, noise.upload_bytes, noise.epsilon) == (0.6, 1024, 7.5)
    assert noise.measure == costs["none"].measure

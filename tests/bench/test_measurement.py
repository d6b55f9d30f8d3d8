"""The benchmark: cells, both ways of an attack, the table, the frontier, and going on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fedsim.bench.cells import both_ways, load_bench
from fedsim.bench.measurement import conduct
from fedsim.bench.table import aggregate, as_markdown, by_cell, pareto
from fedsim.cli import app
from fedsim.core.errors import SpecError
from fedsim.core.metrics import METRICS
from fedsim.core.run import Run
from fedsim.core.spec import Component
from tests.conftest import SMALL
from tests.staging import script

NOISE = "{name: gaussian_noise, strengths: [{std: 0.0}, {std: 1.0, relative: true}]}"
DEFENSES = f"[{NOISE}, {{name: mjp, strengths: [{{probability: 1.0}}]}}]"
BENCH = [
    *SMALL,
    "train={rounds: 1, clients_per_round: 2, lr: 0.05, evaluate: false}",
    f"bench={{defenses: {DEFENSES}, utility: {{train: {{rounds: 2, evaluate: true}}}}}}",
]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame]:
    root = tmp_path_factory.mktemp("bench") / "b"
    return root, conduct(load_bench({}, BENCH), root)


def test_every_defense_and_strength_is_a_cell_and_so_is_none() -> None:
    bench = load_bench({}, BENCH)
    assert [cell.label for cell in bench.cells()] == [
        "none",
        "gaussian_noise std 0.0",
        "gaussian_noise std 1.0 relative",
        "mjp probability 1.0",
    ]
    assert len({cell.folder for cell in bench.cells()}) == 4
    utility = bench.trained(next(bench.cells()))
    assert (utility.train.rounds, utility.train.evaluate) == (2, True)


def test_an_attack_that_can_adapt_runs_both_ways_where_it_matters() -> None:
    attacks = [Component(name="patch_solve"), Component(name="row_space")]
    mjp, noise = Component(name="mjp"), Component(name="gaussian_noise")
    both = list(both_ways(attacks, [mjp]))
    assert [c.short_name for c in both] == ["patch_solve", "patch_solve naive", "row_space"]
    assert both[1].params["adaptive"] is False
    assert len(list(both_ways(attacks, [noise]))) == 2


def test_the_table_holds_leakage_and_accuracy(done: tuple[Path, pd.DataFrame]) -> None:
    root, table = done
    rows = {(r["defense"], r["strength"]): r for r in table.to_dict("records")}
    assert rows["gaussian_noise", "std 0.0"]["psnr"] == 160
    assert rows["gaussian_noise", "std 1.0 relative"]["psnr"] < 30
    assert table["accuracy"].between(0, 1).all()
    mjp = rows["mjp", "probability 1.0"]
    assert mjp["psnr"] == max(mjp["psnr_naive"], mjp["psnr_adaptive"])
    assert pd.read_csv(root / "table.csv").shape == table.shape
    for name in ("table.md", "frontier.png", "frontier.svg", "report.html", "cells.csv"):
        assert (root / name).stat().st_size > 100
    page = (root / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_a_bench_goes_on_and_does_only_what_is_missing(done: tuple[Path, pd.DataFrame]) -> None:
    root, table = done
    kept = Run(root / "cells" / "none-seed-0").root / "summary.json"
    gone = Run(root / "cells" / "mjp-probability-1.0-seed-0").root / "summary.json"
    before = kept.stat().st_mtime_ns
    gone.unlink()
    again = conduct(load_bench({}, BENCH), root)
    assert kept.stat().st_mtime_ns == before
    pd.testing.assert_frame_equal(
        again.drop(columns=["attack_seconds"]), table.drop(columns=["attack_seconds"])
    )
    with pytest.raises(SpecError, match="already holds another bench"):
        conduct(load_bench({}, [*BENCH, "seed=5"]), root)


def frames(scores: dict[tuple[str, int], list[float]]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Pictures and outcomes of one cell: for each attack and seed, the PSNR of its pictures."""
    cost = {"accuracy": 0.5, "rounds_to_target": None, "bytes_a_round": 1024.0}
    cost |= {"upload_bytes": 1024.0, "round_seconds": 1.0, "epsilon": None}
    same = {"defense": "d", "strength": "s"}
    pictures, outcomes = [], []
    for (attack, seed), values in scores.items():
        own = {**same, "attack": attack, "seed": seed}
        outcomes.append({**own, "verdict": "", **cost, "accuracy": 0.5 + 0.1 * seed})
        for client, psnr in enumerate(values):
            numbers = dict.fromkeys((*METRICS, "identified"))
            about = {"round": 1, "client": client, "trial": 0, "seconds": 1.0}
            labels = {"label_true": 1, "label_recovered": 1}
            found = {"psnr": psnr, "ssim": psnr / 100}
            pictures.append({**own, **about, **numbers, **labels, **found})
    return pd.DataFrame(pictures), pd.DataFrame(outcomes)


def test_of_two_ways_the_stronger_counts_and_seeds_are_averaged() -> None:
    scores = {("a", 0): [10.0], ("a", 1): [20.0], ("a naive", 0): [30.0], ("a naive", 1): [20.0]}
    table = aggregate(*frames({**scores, ("prior_only", 0): [99.0]}))
    assert len(table) == 1
    assert (table["psnr"][0], table["psnr_naive"][0], table["psnr_adaptive"][0]) == (25, 25, 15)
    assert (table["psnr_low"][0], table["psnr_high"][0]) == (20, 30)
    assert "15.0 (25.0) [20.0, 30.0]" in as_markdown(table)
    assert "55 % (50 to 60)" in as_markdown(table)
    (cell,) = by_cell(table)
    assert cell["front"]


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    accuracy = np.array([0.9, 0.8, 0.7, 0.8])
    leakage = np.array([1.0, 0.3, 0.5, 0.3])
    assert pareto(accuracy, leakage).tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (SMALL, "section 'bench'"),
        ([*SMALL, "bench={defences: []}"], "bench"),
        ([*SMALL, "bench={defenses: [{name: mjpp}]}"], "did you mean 'mjp'"),
        ([*SMALL, "bench={defenses: [{name: top_k, strengths: [{sparsity: 1.0}]}]}"], "sparsity"),
        ([*BENCH, "defenses=[{name: frozen_pe}]"], "under bench.defenses"),
    ],
)
def test_a_bad_bench_is_one_sentence(overrides: list[str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load_bench({}, overrides)


def test_the_command_prints_the_cells(tmp_path: Path, done: tuple[Path, pd.DataFrame]) -> None:
    spec = tmp_path / "bench.yaml"
    spec.write_text("{}")
    words = ["bench", str(spec), *BENCH, "-o", str(done[0]), "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    cells = json.loads(result.stdout)
    assert [cell["defense"] for cell in cells] == [
        "none",
        "gaussian_noise",
        "gaussian_noise",
        "mjp",
    ]


def test_an_attack_that_declines_is_told_and_does_not_count() -> None:
    table = aggregate(*frames({("a", 0): [], ("b", 0): [12.0]}))
    assert "| d | s | declined | 12.0 |" in as_markdown(table)
    (cell,) = by_cell(table)
    assert cell["attack"] == "b"


def test_a_lever_of_the_spec_is_a_cell_like_a_defense(tmp_path: Path) -> None:
    axis = "{name: batch size, levers: [train.batch_size=2, train.batch_size=3]}"
    bench = load_bench({}, [*BENCH, f"bench={{defenses: [{axis}]}}"])
    cells = list(bench.cells())
    assert [cell.label for cell in cells] == ["none", "batch size 2", "batch size 3"]
    assert [bench.attacked(cell).train.batch_size for cell in cells] == [1, 2, 3]
    assert [bench.trained(cell).train.batch_size for cell in cells] == [1, 2, 3]
    with pytest.raises(SpecError, match="batch_sizes"):
        load_bench({}, [*BENCH, "bench={defenses: [{name: x, levers: [train.batch_sizes=2]}]}"])


def test_cells_on_ray_give_the_same_table(tmp_path: Path, done: tuple[Path, pd.DataFrame]) -> None:
    elsewhere = [*BENCH, "engine={kind: ray, attack_workers: 2, cpus: 2}"]
    table = conduct(load_bench({}, elsewhere), tmp_path / "b")
    timed = ["attack_seconds", "round_seconds"]
    pd.testing.assert_frame_equal(table.drop(columns=timed), done[1].drop(columns=timed))


def test_the_budget_of_a_defense_and_its_bytes_are_in_the_table(tmp_path: Path) -> None:
    axes = (
        "[{name: dp_sgd, strengths: [{noise: 1.0}]}, {name: top_k, strengths: [{sparsity: 0.9}]}]"
    )
    table = conduct(load_bench({}, [*BENCH, f"bench={{defenses: {axes}}}"]), tmp_path / "b")
    rows = {row["defense"]: row for row in table.to_dict("records")}
    assert rows["dp_sgd"]["epsilon"] > 0
    assert pd.isna(rows["none"]["epsilon"])
    assert rows["top_k"]["upload_bytes"] < 0.25 * rows["none"]["upload_bytes"]
    assert rows["top_k"]["bytes_a_round"] == rows["none"]["bytes_a_round"]


def test_strengths_are_compared_victim_by_victim(done: tuple[Path, pd.DataFrame]) -> None:
    root, table = done
    page = script("orderings.py", root)
    noisy = float(table.loc[table["strength"] == "std 1.0 relative", "psnr"].iloc[0])
    (line,) = [row for row in page.splitlines() if "std 1.0 relative" in row]
    assert line.startswith(f"| gaussian_noise | std 1.0 relative | patch_solve | {noisy:.1f} [")
    assert f"| {noisy - 160:.1f} [" in line


def test_shuffled_patches_are_told_from_those_that_stayed(
    done: tuple[Path, pd.DataFrame],
) -> None:
    page = script("mjp.py", "patches", done[0])
    lines = [row for row in page.splitlines() if row.startswith("| mjp probability 1.0 |")]
    assert [line.split("|")[2].strip() for line in lines] == ["patch_solve", "patch_solve naive"]
    shuffled, stayed = (float(cell.split()[0]) for cell in lines[0].split("|")[3:5])
    assert stayed > shuffled

"""A bench, measured: leakage and accuracy of every cell, and going on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from fedsim.bench.cells import load_bench
from fedsim.bench.measurement import conduct
from fedsim.cli import app
from fedsim.core.errors import RunError, SpecError
from fedsim.core.run import Run
from tests.bench.conftest import BENCH
from tests.staging import script


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame]:
    root = tmp_path_factory.mktemp("bench") / "b"
    return root, conduct(load_bench({}, BENCH), root)


def test_the_table_holds_leakage_and_accuracy(done: tuple[Path, pd.DataFrame]) -> None:
    root, table = done
    rows = {(r["defense"], r["strength"]): r for r in table.to_dict("records")}
    assert rows["gaussian_noise", "std 0.0"]["psnr"] == 160
    assert rows["gaussian_noise", "std 1.0 relative"]["psnr"] < 30
    assert table["accuracy"].between(0, 1).all()
    mjp = rows["mjp", "ratio 0.5 probability 1.0"]
    assert mjp["psnr"] == max(mjp["psnr_naive"], mjp["psnr_adaptive"])
    assert pd.read_csv(root / "table.csv").shape == table.shape
    for name in ("table.md", "frontier.png", "frontier.svg", "report.html", "cells.csv"):
        assert (root / name).stat().st_size > 100
    page = (root / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_a_bench_goes_on_and_does_only_what_is_missing(done: tuple[Path, pd.DataFrame]) -> None:
    root, table = done
    kept = Run(root / "cells" / "none-seed-0").root / "summary.json"
    gone = Run(root / "cells" / "mjp-ratio-0.5-probability-1.0-seed-0").root / "summary.json"
    before = kept.stat().st_mtime_ns
    gone.unlink()
    again = conduct(load_bench({}, BENCH), root)
    assert kept.stat().st_mtime_ns == before
    pd.testing.assert_frame_equal(
        again.drop(columns=["attack_seconds"]), table.drop(columns=["attack_seconds"])
    )
    with pytest.raises(SpecError, match="already holds another bench"):
        conduct(load_bench({}, [*BENCH, "seed=5"]), root)


def folder(root: Path, start: str) -> Path:
    (found,) = (root / "cells").glob(f"{start}*")
    return found


def test_numbers_of_a_cell_that_somebody_changed_are_worked_out_again(
    done: tuple[Path, pd.DataFrame],
) -> None:
    root, table = done
    run = Run(folder(root, "none"))
    run.scores.assign(psnr=1.0, ssim=0.0).to_csv(run.root / "scores.csv", index=False)
    other = Run(folder(root, "mjp"))
    other.summary_path.write_text("{}")
    rounds = Run(root / "utility" / other.root.name).root / "rounds.csv"
    rounds.write_text("round,test_accuracy\n1,1.0\n2,1.0\n")
    again = conduct(load_bench({}, BENCH), root)
    pd.testing.assert_frame_equal(
        again.drop(columns=["attack_seconds"]), table.drop(columns=["attack_seconds"])
    )


def test_folders_of_cells_that_changed_places_are_refused(
    tmp_path: Path, done: tuple[Path, pd.DataFrame]
) -> None:
    root = Path(shutil.copytree(done[0], tmp_path / "b"))
    first, second = folder(root, "none"), folder(root, "mjp")
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    with pytest.raises(RunError, match="already holds a run of another spec"):
        conduct(load_bench({}, BENCH), root)


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


@pytest.mark.slow
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
    lines = [
        row for row in page.splitlines() if row.startswith("| mjp ratio 0.5 probability 1.0 |")
    ]
    assert [line.split("|")[2].strip() for line in lines] == ["patch_solve", "patch_solve naive"]
    shuffled, stayed = (float(cell.split()[0]) for cell in lines[0].split("|")[3:5])
    assert stayed > shuffled

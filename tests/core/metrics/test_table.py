"""The table of metrics: one entry is all it takes, and what it shares is computed once."""

from __future__ import annotations

import re
import shutil
from html import unescape
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import fedsim
from fedsim.audit.stages import conclude
from fedsim.audit.tensorboard import Events
from fedsim.campaign.progress import Silent
from fedsim.cli import app
from fedsim.core import metrics
from fedsim.core.metrics import METRICS, Batch, Comparison, Metric
from fedsim.core.metrics.table import EVERYWHERE
from fedsim.core.run import Run
from fedsim.scoring.scores import Yardstick, columns
from fedsim.scoring.statistics import describe, interval, mean_interval
from fedsim.viewer.app import create_app
from tests.conftest import SMALL
from tests.viewing import TOKEN, comparison, look

ROOT = Path(__file__).parents[3]
CONTRACT = [
    *("round", "client", "attack", "threat", "trial", "image"),
    *("mse", "psnr", "psnr_registered", "ssim", "lpips", "fft2d"),
    *("label_true", "label_recovered", "identified", "seconds", "loss", "canary"),
]
NOT_LPIPS = [name for name in METRICS if name != "lpips"]
A, B = torch.rand(2, 3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def darkest(images: Tensor) -> Tensor:
    return images.amin((1, 2, 3))


SHADE = Metric(
    "shade",
    "Shade",
    lambda pair: (pair.truth.once(darkest) - pair.guess.once(darkest)).abs(),
    "lower",
    shown=EVERYWHERE,
)


@pytest.fixture
def shade(monkeypatch: pytest.MonkeyPatch) -> Metric:
    monkeypatch.setitem(METRICS, SHADE.name, SHADE)
    return SHADE


@pytest.fixture
def scored_anew(shade: Metric, small_run: Run, tmp_path: Path) -> Run:
    """A finished run, scored and reported once more now that there is one metric more."""
    run = Run(shutil.copytree(small_run.root, tmp_path / "runs" / "one"))
    conclude(run)
    return run


def cells(page: str, tag: str = "th") -> list[str]:
    """What a page's tables say in their cells."""
    return [
        unescape(re.sub(r"<[^>]*>", " ", cell)).strip()
        for cell in re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page, re.S)
    ]


def test_the_columns_of_the_contract_stand_in_their_order() -> None:
    assert [name for name in columns() if name in CONTRACT] == CONTRACT


def test_an_added_metric_is_in_scores_summary_and_report(scored_anew: Run) -> None:
    scores, summary = scored_anew.scores, scored_anew.summary
    assert list(scores.columns) == columns()
    assert columns()[columns().index("fft2d") + 1] == "shade"
    exact = scores[scores["attack"] == "patch_solve"]
    assert exact["shade"].tolist() == pytest.approx([0.0] * len(exact), abs=1e-6)
    entry = next(v for v in summary["verdicts"] if v["attack"] == "patch_solve")
    assert entry["metrics"]["shade"]["worst_case"] == exact["shade"].min()
    assert entry["baseline"]["shade"] > 0
    assert {"psnr", "ssim", "shade"} <= summary["comparisons"][0].keys()
    assert {"psnr", "ssim", "shade"} <= summary["population"][0].keys()
    assert {"psnr", "ssim", "shade"} <= summary["over_rounds"][0].keys()
    page = scored_anew.report.read_text()
    assert cells(page).count("Shade") == 3  # scores, the most exposed, attack against attack
    assert "FFT2D, Shade and LPIPS: lower is closer" in page
    assert re.search(r"dB.*, Shade \d\.\d\d\"", page)  # of a picture, to those who cannot see it


def test_an_added_metric_is_in_tensorboard_and_the_viewer(scored_anew: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Events(Silent(), scored_anew.root).conclude(scored_anew)
    events = EventAccumulator(str(scored_anew.root / "tensorboard"))
    events.Reload()
    assert "leakage/shade/patch_solve" in events.Tags()["scalars"]
    shelf = scored_anew.root.parent
    shutil.copytree(scored_anew.root, shelf / "two")
    viewer = create_app([shelf], TOKEN)
    page = look(viewer, comparison(viewer, "one", "two")).text
    assert cells(page)[cells(page).index("SSIM") :][:3] == ["SSIM", "Shade", "LPIPS"]
    assert "LPIPS: lower is closer" in page
    mean = scored_anew.summary["verdicts"][0]["metrics"]["shade"]["mean"]
    assert any(cell.startswith(f"{mean:.3f}") for cell in cells(page, "td"))


def test_an_added_metric_is_in_a_benchs_tables_and_its_cells(shade: Metric, tmp_path: Path) -> None:
    one = "bench={defenses: [{name: clipping, strengths: [{norm: 1.0}]}]}"
    words = [*SMALL, "train.rounds=1", one]
    spec, output = tmp_path / "spec.yaml", tmp_path / "bench"
    spec.write_text("{}")
    table = fedsim.bench(spec, *words, output=output)
    assert table["shade"].notna().all()
    for name in ("table.csv", "pictures.csv"):
        assert "shade" in pd.read_csv(output / name).columns
    assert "Shade 0.00" in (output / "report.html").read_text()
    shown = CliRunner().invoke(app, ["bench", str(spec), *words, "-o", str(output)])
    assert shown.exit_code == 0, shown.output
    assert "Shade" in shown.output


def test_a_report_of_a_run_scored_before_the_metric_was_added_leaves_it_empty(
    small_run: Run, shade: Metric, tmp_path: Path
) -> None:
    from fedsim.campaign.plan import jobs_of, victims
    from fedsim.report import write_report

    run = Run(shutil.copytree(small_run.root, tmp_path / "run"))
    page = write_report(run, jobs_of(run, run.spec, victims(run.spec))).read_text()
    assert "Shade –" in page


def test_what_metrics_share_of_the_truth_is_computed_once_for_all_attacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Tensor] = []

    def feature(images: Tensor) -> Tensor:
        seen.append(images)
        return images.mean((1, 2, 3))

    def apart(pair: Comparison) -> Tensor:
        return pair.truth.once(feature) - pair.guess.once(feature)

    for name in ("first", "second"):
        monkeypatch.setitem(METRICS, name, Metric(name, name, apart, "lower"))
    yardstick = Yardstick.of(A, None)
    for guess in (B, 1 - B):
        yardstick.measure(guess)
    assert [sum(images is batch for images in seen) for batch in (A, B)] == [1, 1]
    assert len(seen) == 3


@pytest.mark.parametrize("name", NOT_LPIPS)
def test_an_entry_measures_what_the_function_of_its_name_does(name: str) -> None:
    measured = METRICS[name].measure(Comparison(Batch(A), Batch(B)))
    assert torch.equal(measured, getattr(metrics, name)(A, B))


def test_the_entry_of_lpips_measures_lpips(real_weights: None) -> None:
    a, b = torch.rand(2, 2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    expected = metrics.lpips(a, b)
    assert expected is not None
    assert torch.equal(METRICS["lpips"].measure(Comparison(Batch(a), Batch(b))), expected)


@pytest.mark.parametrize("name", NOT_LPIPS)
def test_a_copy_is_the_closest_in_the_direction_an_entry_names(name: str) -> None:
    metric = METRICS[name]
    same, other = (float(metric.measure(Comparison(Batch(A), Batch(x))).mean()) for x in (A, B))
    assert (same > other) == (metric.leaks == "higher")
    table = pd.DataFrame({"round": 1, "client": [0, 1], name: [same, other]})
    assert describe(table, name)["worst_case"] == same


def test_a_metric_that_may_be_empty_says_why_and_makes_no_headlines() -> None:
    assert METRICS["lpips"].missing(16) == METRICS["lpips"].missing(64)  # small ones are enlarged
    assert METRICS["psnr"].missing(1) is None
    with pytest.raises(ValueError, match="no headlines"):
        Metric("m", "M", SHADE.measure, "lower", shown=EVERYWHERE, unavailable=lambda _: "why")


def test_an_interval_of_single_values_is_that_of_victims_with_one_picture_each() -> None:
    values = np.random.default_rng(3).normal(size=7)
    table = pd.DataFrame({"round": 1, "client": range(7), "x": values})
    assert mean_interval(list(values[:, None])) == interval(table, "x")


@pytest.mark.parametrize(
    ("formula", "owner"),
    [
        (r"10 \* .*log10", "fedsim/core/metrics/pixels.py"),
        (r"t\.ppf\(0\.975, number", "fedsim/scoring/statistics.py"),
        (r"conj\(\)", "fedsim/core/phase_correlation.py"),
    ],
    ids=["psnr", "interval", "phase correlation"],
)
def test_a_formula_stands_once(formula: str, owner: str) -> None:
    folders = ("fedsim", "attacks", "defenses", "clients", "experiments", "tests")
    files = {file.resolve() for folder in folders for file in (ROOT / folder).rglob("*.py")}
    holders = [file for file in files if re.search(formula, file.read_text())]
    assert holders == [ROOT / owner]

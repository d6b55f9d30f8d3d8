"""From Python: what a finished run gives back, in a script, in a notebook, in TensorBoard."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedsim
from fedsim.campaign.plan import victims
from fedsim.cli import app
from fedsim.core.errors import RunError
from fedsim.core.run import Run
from tests.conftest import SMALL


def test_images_are_what_the_attack_returned(small_run: Run) -> None:
    round_, client = victims(small_run.spec)[0]
    images = small_run.images("patch_solve", round_, client)
    assert tuple(images.shape) == (1, 3, 32, 32)
    assert 0 <= float(images.min()) <= float(images.max()) <= 1
    with pytest.raises(RunError, match="no reconstruction by nobody"):
        small_run.images("nobody", round_, client)


def test_a_notebook_shows_the_verdicts(small_run: Run, tmp_path: Path) -> None:
    page = small_run._repr_html_()
    assert "<b>LEAKS</b>" in page
    assert str(small_run.report) in page
    assert "not finished" in Run(tmp_path)._repr_html_()
    assert repr(small_run) == f"Run('{small_run.root}')"


def test_a_bench_can_be_asked_for_twice(tmp_path: Path) -> None:
    one = "bench={defenses: [{name: clipping, strengths: [{norm: 1.0}]}]}"
    for attempt in ("a", "b"):
        table = fedsim.bench({}, *SMALL, "train.rounds=1", one, output=tmp_path / attempt)
        assert list(table["defense"]) == ["none", "clipping"]


def test_tensorboard_gets_rounds_leakage_and_pictures(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    root = tmp_path / "run"
    words = ["audit", *SMALL, "train.evaluate=true", "-o", str(root), "--tensorboard", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    events = EventAccumulator(str(root / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert {"rounds/test_accuracy", "leakage/psnr/patch_solve"} <= set(tags["scalars"])
    assert [event.step for event in events.Scalars("rounds/test_accuracy")] == [1, 2]
    assert events.Scalars("leakage/psnr/patch_solve")[0].value == 160
    assert "pictures/patch_solve" in tags["images"]

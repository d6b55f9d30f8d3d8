"""TensorBoard events of a run."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from fedsim.cli import app
from tests.conftest import SMALL


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

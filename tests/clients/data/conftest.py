"""What tests of data share: a cache of their own, a photo, a tree of pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from fedsim.clients.data.datasets import load_images
from fedsim.core.spec import DataSpec

SHARED = Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDSIM_CACHE", str(folder))
    return folder


@pytest.fixture
def photo() -> Image.Image:
    return to_pil(load_images(DataSpec(image_size=64), "train").image(0))


@pytest.fixture
def tree(tmp_path: Path, photo: Image.Image) -> Path:
    """Three classes of eight pictures."""
    return photo_tree(tmp_path / "tree", photo, ["bird", "cat", "dog"], 8)


def to_pil(image: torch.Tensor) -> Image.Image:
    return Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())


def photo_tree(root: Path, photo: Image.Image, classes: list[str], each: int) -> Path:
    for c, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(each):
            photo.rotate(20 * (each * c + i)).save(root / name / f"{i:04}.jpg")
    return root


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

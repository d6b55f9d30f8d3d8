"""Digests: a picture is known by its pixels, and a large set is read once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedsim.clients.data import folders
from fedsim.clients.data.digests import UNREADABLE, digests_of, pixel_digest
from fedsim.clients.data.folders import load_tree
from fedsim.clients.data.pictures import ImageSet, Remembered, decode, to_tensor
from fedsim.core.errors import DataError


class Counted(ImageSet):
    """Four pictures; says how often one was asked for."""

    def __init__(self, stamp: str | None, broken: int = -1) -> None:
        self.classes, self.labels = ("one",), np.zeros(4, dtype=np.int64)
        self.stamp, self.broken, self.asked = stamp, broken, 0

    def image(self, index: int) -> torch.Tensor:
        self.asked += 1
        if index == self.broken:
            raise DataError("it is broken.")
        return torch.full((3, 8, 8), index / 4)


def test_a_copy_in_another_format_under_another_name_has_the_same_digest(
    tmp_path: Path, photo: Image.Image
) -> None:
    photo.save(tmp_path / "a.png")
    photo.save(tmp_path / "b.bmp")
    photo.rotate(90).save(tmp_path / "c.png")
    first, second, other = (
        pixel_digest(to_tensor(decode((tmp_path / name).read_bytes()), 32))
        for name in ("a.png", "b.bmp", "c.png")
    )
    assert first == second != other


def test_a_picture_that_cannot_be_read_has_none() -> None:
    digests = digests_of(Counted(None, broken=2), np.arange(4))
    assert digests[2] == UNREADABLE
    assert len(set(digests)) == 4


def test_a_set_with_a_stamp_is_read_once_and_again_when_the_stamp_changes(cache: Path) -> None:
    rows = np.array([0, 2, 3])
    first = digests_of(Counted("now"), rows)
    for images, asked in ((Counted("now"), 0), (Counted("later"), 3), (Counted(None), 3)):
        assert digests_of(images, rows) == first
        assert images.asked == asked
    assert digests_of(whole := Counted("now"), np.arange(4))[1:2] != first[1:2]
    assert whole.asked == 4
    for file in cache.glob("pixels-*"):
        file.write_text("spoilt")
    assert digests_of(again := Counted("now"), rows) == first
    assert again.asked == 3


def test_a_large_tree_has_a_stamp_that_follows_its_files(
    tree: Path, monkeypatch: pytest.MonkeyPatch, photo: Image.Image
) -> None:
    assert load_tree(str(tree), "train", 16).stamp is None  # small: read through in a moment
    monkeypatch.setattr(folders, "LARGE", 4)
    before, other_size = (load_tree(str(tree), "train", size).stamp for size in (16, 32))
    assert before is not None
    assert before != other_size
    assert Remembered(load_tree(str(tree), "train", 16)).stamp == before
    photo.resize((40, 40)).save(next(tree.glob("cat/*.jpg")))
    for file in tree.glob("cat/*.jpg"):
        photo.resize((40, 40)).save(file)
    assert load_tree(str(tree), "train", 16).stamp != before

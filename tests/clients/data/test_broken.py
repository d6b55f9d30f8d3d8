"""Damaged pictures: left out, named, looked for once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from fedsim.clients.data import broken
from fedsim.core.errors import DataError
from tests.clients.data.conftest import truncate
from tests.layouts import load


def test_damaged_pictures_are_left_out_and_named(tree: Path) -> None:
    truncate(tree / "cat" / "0003.jpg")
    (tree / "dog" / "0001.jpg").write_bytes(b"not a picture")
    (tree / "dog" / "gone.jpg").symlink_to(tree / "nowhere.jpg")
    train, test = load("imagefolder", tree), load("imagefolder", tree, "test")
    assert len(train) + len(test) == 22
    assert {*train.skipped, *test.skipped} == {"cat/0003.jpg", "dog/0001.jpg", "dog/gone.jpg"}
    assert not set(train.skipped) & set(test.skipped)
    for images in (train, test):
        for index in range(len(images)):
            images.image(index)


def test_the_damage_is_looked_for_once(
    tree: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truncate(tree / "cat" / "0003.jpg")
    first = {*load("imagefolder", tree).skipped, *load("imagefolder", tree, "test").skipped}
    assert len(list(cache.iterdir())) == 1

    def fail(content: bytes) -> Image.Image:
        raise AssertionError("decoded again")

    monkeypatch.setattr(broken, "decode", fail)
    again = {*load("imagefolder", tree).skipped, *load("imagefolder", tree, "test").skipped}
    assert again == first == {"cat/0003.jpg"}

    os.utime(tree / "bird" / "0000.jpg", (1, 1))
    with pytest.raises(AssertionError, match="decoded again"):
        load("imagefolder", tree)


def test_a_spoilt_cache_is_made_again(tree: Path, cache: Path) -> None:
    load("imagefolder", tree)
    (file,) = cache.iterdir()
    file.write_text("{")
    assert len(load("imagefolder", tree)) > 0
    assert '"pictures": 24' in file.read_text()


def test_a_cache_that_cannot_be_written_is_done_without(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "file"))
    assert len(load("imagefolder", tree)) > 0


def test_a_picture_that_breaks_later_is_told(tree: Path) -> None:
    images = load("imagefolder", tree)
    for file in tree.rglob("*.jpg"):
        truncate(file)
    with pytest.raises(DataError, match=r"can no longer be decoded"):
        images.image(0)

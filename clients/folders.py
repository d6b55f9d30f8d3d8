"""A tree ``class/.../picture`` as a data set: any ImageNet, CelebA by identity, one's own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from clients.damage import damaged_pictures
from clients.pictures import DAMAGED, ImageSet, decode, to_tensor
from clients.trees import SPLITS, Tree, open_tree
from fedsim.core.errors import DataError

TEST_FRACTION = 0.2


class TreeImages(ImageSet):
    """One split of a tree; each picture's centre square, read from its file when asked for."""

    def __init__(
        self,
        tree: Tree,
        pictures: Sequence[_Picture],
        classes: tuple[str, ...],
        skipped: tuple[str, ...],
        image_size: int,
    ) -> None:
        number = {name: label for label, name in enumerate(classes)}
        self.classes = classes
        self.labels = np.array([number[p.label] for p in pictures], dtype=np.int64)
        self.skipped = skipped
        self._tree = tree
        self._names = [p.name for p in pictures]
        self._image_size = image_size

    def image(self, index: int) -> torch.Tensor:
        name = self._names[index]
        try:
            picture = decode(self._tree.read(name))
        except DAMAGED as error:
            raise DataError(
                f"{name} in {self._tree.where} was whole and can no longer be decoded; "
                "restore it, or start again and it will be left out."
            ) from error
        return to_tensor(picture, self._image_size)


class _Picture(NamedTuple):
    name: str
    label: str
    split: str | None  # None: the tree does not say


def load_tree(
    path: str,
    split: Literal["train", "test"],
    image_size: int,
    class_order: Sequence[str] = (),
) -> TreeImages:
    """One split of the tree at ``path``, without its damaged pictures.

    ``train/`` beside ``test/`` or ``val/`` are the splits where they exist; else (also where only
    one of them does) a fifth of the pictures, by a hash of their names, is for test. Classes are
    numbered alphabetically, or in ``class_order`` if it names them all; one whose pictures are
    all damaged keeps its number.
    """
    tree = open_tree(path)
    stamps = tree.listing()
    if not stamps:
        raise DataError(f"{tree.where} holds no pictures; give a tree class/picture.jpg.")
    pictures = _placed(stamps)
    if not pictures:
        raise DataError(
            f"the pictures of {tree.where} lie in no class folder; move them to one folder a class."
        )
    damaged = damaged_pictures(tree, {p.name: stamps[p.name] for p in pictures})
    whole = [p for p in pictures if p.name not in damaged]
    if not whole:
        raise DataError(f"all {len(damaged)} pictures of {tree.where} are damaged; get them anew.")

    test = _test_names(whole) | {p.name for p in pictures if p.name in damaged and _in_test(p)}
    chosen = [p for p in whole if (p.name in test) == (split == "test")]
    if not chosen:
        raise DataError(
            f"{tree.where} has no whole picture for {split}; add some, at least two in all."
        )
    skipped = [p.name for p in pictures if p.name in damaged]
    skipped_here = tuple(name for name in skipped if (name in test) == (split == "test"))
    classes = _ordered({p.label for p in pictures}, class_order)
    return TreeImages(tree, chosen, classes, skipped_here, image_size)


def _placed(names: Iterable[str]) -> list[_Picture]:
    """The class, and where the folders tell it the split, of every picture in a class folder."""
    paths = {name: tuple(name.split("/")) for name in names}
    if len({parts[0] for parts in paths.values()}) == 1:
        inner = {name: parts[1:] for name, parts in paths.items() if len(parts) > 1}
        if _split_folders(inner.values()):  # a folder around the splits, as zips often have
            paths = inner
    if folders := _split_folders(paths.values()):
        return [
            _Picture(name, parts[1], folders[parts[0]])
            for name, parts in paths.items()
            if parts[0] in folders and len(parts) > 2
        ]
    if any(all(p[0] == lone and len(p) > 2 for p in paths.values()) for lone in SPLITS):
        paths = {name: parts[1:] for name, parts in paths.items()}
    return [_Picture(name, parts[0], None) for name, parts in paths.items() if len(parts) > 1]


def _split_folders(paths: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """``{"train": "train", "val": "test"}`` or alike; empty where the tree has no splits."""
    tops = {parts[0] for parts in paths if len(parts) > 2}
    # ImageNet's test/ is without labels, so without class folders: then val/ is for test.
    for held_out in ("test", "val"):
        if {"train", held_out} <= tops:
            return {"train": "train", held_out: "test"}
    return {}


def _test_names(pictures: Sequence[_Picture]) -> set[str]:
    """Which pictures are for test; both splits get one where there are two pictures."""
    test = {p.name for p in pictures if _in_test(p)}
    if any(p.split for p in pictures):
        return test
    if len(pictures) == 1:
        return set()
    by_class: dict[str, list[str]] = {}
    for p in pictures:
        by_class.setdefault(p.label, []).append(p.name)
    for names in by_class.values():
        # A class of several pictures is never for test only.
        if len(names) > 1 and test.issuperset(names):
            test.remove(max(names, key=_hash))
    if not test:
        test.add(min((p.name for p in pictures), key=_hash))
    if len(test) == len(pictures):
        test.remove(max(test, key=_hash))
    return test


def _in_test(picture: _Picture) -> bool:
    if picture.split:
        return picture.split == "test"
    return _hash(picture.name) < TEST_FRACTION


def _hash(name: str) -> float:
    """A number in [0, 1) that depends on nothing but the name."""
    # Names that are not valid text in the file system's encoding exist, and count too.
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _ordered(names: set[str], order: Sequence[str]) -> tuple[str, ...]:
    if names <= set(order):
        return tuple(name for name in order if name in names)
    return tuple(sorted(names))

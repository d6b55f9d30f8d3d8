"""Folders: a tree ``class/.../picture`` as a data set, be it an ImageNet or your own pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedsim.clients.data.broken import damaged_pictures, remember_damage
from fedsim.clients.data.listing import LARGE, Listing, Names
from fedsim.clients.data.pictures import DAMAGED, ImageSet, Split, decode, path_of, to_tensor
from fedsim.clients.data.trees import SPLITS, Tree, open_tree
from fedsim.core.errors import DataError
from fedsim.core.spec import DataSpec
from fedsim.core.text import visible

TEST_FRACTION = 0.2


class TreeImages(ImageSet):
    """One split of a tree; each picture's centre square, read from its file when asked for."""

    def __init__(
        self,
        tree: Tree,
        names: Names,
        marks: np.ndarray | None,  # of a large tree, whose pictures were not decoded before
        image_size: int,
    ) -> None:
        self._tree, self._names, self._marks = tree, names, marks
        self._image_size = image_size

    def image(self, index: int) -> torch.Tensor:
        name = self._names[index]
        try:
            content = self._tree.read(name)
        except OSError as error:
            raise self._broken(name) from error
        try:
            picture = decode(content)
        except DAMAGED as error:
            if self._marks is not None:
                remember_damage(self._tree, name, int(self._marks[index]))
            raise self._broken(name) from error
        return to_tensor(picture, self._image_size)

    def _broken(self, name: str) -> DataError:
        before = "was whole and can no longer" if self._marks is None else "looked whole and cannot"
        return DataError(
            f"{name} in {self._tree.where} {before} be decoded; "
            "restore it, or start again and it will be left out."
        )


@dataclass(frozen=True)
class Placement:
    """Where each picture of a listing belongs."""

    labels: np.ndarray  # int64; -1: not in the data set
    classes: tuple[str, ...]
    test: np.ndarray | None = None  # bool; None: a fifth, by a hash of the names
    groups: np.ndarray | None = None  # int64, whose picture it is


def load_imagefolder(data: DataSpec, split: Split) -> TreeImages:
    """Any tree of pictures by class."""
    where = path_of(data, "a folder with one folder of pictures per class")
    return load_tree(where, split, data.image_size)


def load_tree(
    path: str,
    split: Split,
    image_size: int,
    class_order: Sequence[str] = (),
) -> TreeImages:
    """One split of the tree at ``path``, without its damaged pictures.

    ``train/`` beside ``test/`` or ``val/`` are the splits where they exist; else (also where only
    one of them does) a fifth of the pictures, by a hash of their names, is for test. Classes are
    numbered alphabetically, or in ``class_order`` if it names them all; one whose pictures are all
    damaged keeps its number. In a tree ``class/person/picture`` the second folder's name is whose
    picture it is, for a natural partition.
    """
    tree = open_tree(path)
    listing = tree.listing()
    if not len(listing):
        raise DataError(f"{tree.where} holds no pictures; give a tree class/picture.jpg.")
    return choose(tree, listing, place_by_folder(listing, class_order), split, image_size)


def choose(
    tree: Tree,
    listing: Listing,
    placement: Placement,
    split: Split,
    image_size: int,
) -> TreeImages:
    """The whole pictures of one split."""
    rows = np.flatnonzero(placement.labels >= 0)
    if not len(rows):
        raise DataError(
            f"the pictures of {tree.where} lie in no class folder; move them to one per class."
        )
    damaged = damaged_pictures(tree, listing, rows)
    if damaged.all():
        raise DataError(f"all {len(rows)} pictures of {tree.where} are damaged; get them anew.")

    if placement.test is not None:
        test = placement.test[rows]
    else:
        test = _held_out(listing.names.take(rows), placement.labels[rows], ~damaged)
    here = test == (split == "test")
    chosen = rows[here & ~damaged]
    if not len(chosen):
        raise DataError(
            f"{tree.where} has no whole picture for {split}; add some, at least two in all."
        )
    marks = listing.marks[chosen] if len(rows) > LARGE else None
    images = TreeImages(tree, listing.names.take(chosen), marks, image_size)
    images.classes = tuple(map(visible, placement.classes))  # they are written down: as text
    images.labels = placement.labels[chosen]
    images.skipped = tuple(listing.names.take(rows[here & damaged]))
    images.groups = placement.groups[chosen] if placement.groups is not None else None
    if marks is not None:
        images.stamp = f"{tree.where} {hashlib.sha256(marks.tobytes()).hexdigest()} {image_size}"
    return images


def place_by_folder(
    listing: Listing, class_order: Sequence[str] = (), held_out: Sequence[str] = ("test", "val")
) -> Placement:
    """The class, and where the folders tell them the split and the person, of every picture.

    ``held_out``: what the folder for test may be called, the first that is there counts.
    """
    paths = {f: tuple(f.split("/")) if f else () for f in listing.folders}
    if len({parts[:1] for parts in paths.values()}) == 1:
        inner = {folder: parts[1:] for folder, parts in paths.items()}
        if _split_folders(
            inner.values(), held_out
        ):  # a folder around the splits, as zips often have
            paths = inner
    splits = _split_folders(paths.values(), held_out)
    if splits:
        for_test = {f: splits[p[0]] == "test" for f, p in paths.items() if p and p[0] in splits}
        paths = {folder: paths[folder][1:] for folder in for_test}
    elif any(all(p[:1] == (lone,) and len(p) > 1 for p in paths.values()) for lone in SPLITS):
        paths = {folder: parts[1:] for folder, parts in paths.items()}
    placed = {folder: parts for folder, parts in paths.items() if parts}
    classes = _ordered({parts[0] for parts in placed.values()}, class_order)
    numbers = {name: number for number, name in enumerate(classes)}
    labels = spread(listing, {f: numbers[parts[0]] for f, parts in placed.items()}, -1)
    test = spread(listing, for_test, False) if splits else None
    groups = None
    if placed and all(len(parts) > 1 for parts in placed.values()):
        people = {name: n for n, name in enumerate(sorted({p[1] for p in placed.values()}))}
        groups = spread(listing, {f: people[parts[1]] for f, parts in placed.items()}, -1)
    return Placement(labels, classes, test, groups)


def spread(listing: Listing, by_folder: Mapping[str, int], otherwise: int) -> np.ndarray:
    """What each picture's folder says."""
    values = np.array([by_folder.get(folder, otherwise) for folder in listing.folders])
    return values[listing.folder_of]


def _split_folders(paths: Iterable[tuple[str, ...]], held_out: Sequence[str]) -> dict[str, str]:
    """``{"train": "train", "val": "test"}`` or alike; empty where the tree has no splits."""
    # ImageNet's test/ is without labels, so without class folders: then val/ is for test.
    tops = {parts[0] for parts in paths if len(parts) > 1}
    for name in held_out:
        if {"train", name} <= tops:
            return {"train": "train", name: "test"}
    return {}


def _held_out(names: Names, labels: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Which pictures are for test; each split gets a whole one where there are two."""
    hashes = np.array([hash_of(name) for name in names])
    test = hashes < TEST_FRACTION
    if whole.sum() == 1:
        return test & ~whole
    # A class of several pictures is never for test only.
    sizes = np.bincount(labels[whole])
    tests = np.bincount(labels[whole & test], minlength=len(sizes))
    for label in np.flatnonzero((sizes > 1) & (tests == sizes)):
        rows = np.flatnonzero(whole & (labels == label))
        test[rows[np.argmax(hashes[rows])]] = False
    rows = np.flatnonzero(whole)
    if not test[rows].any():
        test[rows[np.argmin(hashes[rows])]] = True
    if test[rows].all():
        test[rows[np.argmax(hashes[rows])]] = False
    return test


def hash_of(name: str) -> float:
    """A number in [0, 1) that depends on nothing but the name."""
    # Names that are not valid text in the file system's encoding exist, and count too.
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _ordered(names: set[str], order: Sequence[str]) -> tuple[str, ...]:
    if names <= set(order):
        return tuple(name for name in order if name in names)
    return tuple(sorted(names))

"""CIFAR-10 and CIFAR-100 as they lie on disk: the official python batches, or trees."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fedsim.clients.data.folders import load_tree
from fedsim.clients.data.pickles import read_pickle
from fedsim.clients.data.pictures import ImageSet, Split, path_of, to_tensor
from fedsim.core.errors import DataError, did_you_mean
from fedsim.core.spec import DataSpec
from fedsim.core.unpickling import Array

CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_CIFAR100_LABELS = ("fine", "coarse")


@dataclass(frozen=True)
class _Layout:
    """How one of the two lies on disk."""

    title: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: str  # the key of the labels in a batch
    meta: str
    names: str  # the key of the class names in ``meta``
    default_names: tuple[str, ...] = ()  # where there is no ``meta``

    def files(self, split: Split) -> tuple[str, ...]:
        return self.train if split == "train" else self.test


_CIFAR10 = _Layout(
    "CIFAR-10",
    "cifar-10-batches-py",
    tuple(f"data_batch_{i}" for i in range(1, 6)),
    ("test_batch",),
    "labels",
    "batches.meta",
    "label_names",
    CLASSES,
)


class _CifarBatches(ImageSet):
    """One split of the official batches; the pixels are read again in each process, not sent."""

    def __init__(self, folder: Path, layout: _Layout, split: Split, image_size: int) -> None:
        self._files = [folder / name for name in layout.files(split)]
        self._layout, self._image_size = layout, image_size
        batches = [_read_batch(file, layout) for file in self._files]
        self._pixels: np.ndarray | None = np.concatenate([pixels for pixels, _ in batches])
        self.labels = np.concatenate([labels for _, labels in batches])
        self.classes = _class_names(folder / layout.meta, layout)
        if self.labels.size and not 0 <= self.labels.min() <= self.labels.max() < len(self.classes):
            raise DataError(f"{folder} has labels without a class name; get {layout.title} anew.")

    def image(self, index: int) -> torch.Tensor:
        if self._pixels is None:
            batches = [_read_batch(file, self._layout) for file in self._files]
            self._pixels = np.concatenate([pixels for pixels, _ in batches])
        picture = self._pixels[index].reshape(3, 32, 32).transpose(1, 2, 0)
        return to_tensor(Image.fromarray(np.ascontiguousarray(picture)), self._image_size)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pixels": None}


def load_cifar10(data: DataSpec, split: Split) -> ImageSet:
    """``data.path``: the official batches or their parent, or a tree or zips of pictures."""
    where = path_of(
        data, "the folder cifar-10-batches-py, a tree split/class/picture.jpg or its zips"
    )
    return _load(where, _CIFAR10, split, data.image_size)


def load_cifar100(data: DataSpec, split: Split) -> ImageSet:
    """As ``load_cifar10``; ``data.label``: fine, the 100 classes, or coarse, the 20 above them."""
    where = path_of(data, "the folder cifar-100-python, a tree split/class/picture.jpg or its zips")
    label = data.label or _CIFAR100_LABELS[0]
    if label not in _CIFAR100_LABELS:
        raise DataError(
            f"cifar100 has no label '{label}'{did_you_mean(label, _CIFAR100_LABELS)}; "
            "data.label is fine or coarse."
        )
    layout = _Layout(
        "CIFAR-100",
        "cifar-100-python",
        ("train",),
        ("test",),
        f"{label}_labels",
        "meta",
        f"{label}_label_names",
    )
    return _load(where, layout, split, data.image_size)


def _load(path: str, layout: _Layout, split: Split, image_size: int) -> ImageSet:
    root = Path(path).expanduser().resolve()
    for folder in (root, root / layout.folder):
        if any((folder / name).is_file() for name in (*layout.train, *layout.test)):
            return _CifarBatches(folder, layout, split, image_size)
    if layout.labels == "coarse_labels":
        raise DataError(
            f"{root} holds no cifar-100-python, and a tree of pictures has no coarse labels; "
            "give the official python version, or leave out data.label."
        )
    return load_tree(path, split, image_size, class_order=layout.default_names)


def _read_batch(file: Path, layout: _Layout) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (n, 3072) uint8, channel by channel, and labels (n,)."""
    content = read_pickle(file, layout.title)
    data, labels = content.get("data"), content.get(layout.labels)
    pixels = data.values if isinstance(data, Array) else None
    if (
        pixels is None
        or pixels.dtype != np.uint8
        or pixels.ndim != 2
        or pixels.shape[1] != 3 * 32 * 32
        or not isinstance(labels, list)
        or len(labels) != len(pixels)
        or not all(isinstance(label, int) for label in labels)
    ):
        raise DataError(
            f"{file} is not a {layout.title} batch; get {layout.title}'s python version anew."
        )
    return pixels, np.array(labels, dtype=np.int64)


def _class_names(meta: Path, layout: _Layout) -> tuple[str, ...]:
    if not meta.is_file() and layout.default_names:
        return layout.default_names
    names = read_pickle(meta, layout.title).get(layout.names)
    if not isinstance(names, list) or not all(isinstance(name, bytes | str) for name in names):
        raise DataError(
            f"{meta} does not name the classes; get {layout.title}'s python version anew."
        )
    return tuple(n.decode("utf-8", "replace") if isinstance(n, bytes) else n for n in names)

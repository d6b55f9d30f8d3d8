"""The data sets a spec can name, each loaded as an ``ImageSet``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from clients.cifar import load_cifar10
from clients.folders import load_tree
from clients.photos import LfwSubset, Photos
from clients.pictures import ImageSet
from fedsim.core.errors import DataError, did_you_mean
from fedsim.core.spec import DataSpec

__all__ = ["ImageSet", "Split", "dataset_names", "load_images"]

Split = Literal["train", "test"]


def load_images(data: DataSpec, split: Split) -> ImageSet:
    """One split of the data set that ``data`` names; no picture is held until it is asked for."""
    if data.name not in _LOADERS:
        raise DataError(
            f"there is no data set '{data.name}'{did_you_mean(data.name, _LOADERS)}; "
            f"known: {', '.join(dataset_names())}."
        )
    return _LOADERS[data.name](data, split)


def dataset_names() -> list[str]:
    """What ``data.name`` may be."""
    return sorted(_LOADERS)


def _photos(data: DataSpec, split: Split) -> ImageSet:
    return Photos(split, data.image_size)


def _lfw_subset(data: DataSpec, split: Split) -> ImageSet:
    return LfwSubset(split, data.image_size)


def _imagefolder(data: DataSpec, split: Split) -> ImageSet:
    return load_tree(
        _path(data, "a folder with one folder of pictures a class"), split, data.image_size
    )


def _cifar10(data: DataSpec, split: Split) -> ImageSet:
    where = _path(
        data, "the folder cifar-10-batches-py, a tree split/class/picture.jpg or its zips"
    )
    return load_cifar10(where, split, data.image_size)


def _path(data: DataSpec, what: str) -> str:
    if not data.path:
        raise DataError(f"data.path is needed for {data.name}: give {what}.")
    return data.path


_LOADERS: dict[str, Callable[[DataSpec, Split], ImageSet]] = {
    "photos": _photos,
    "lfw_subset": _lfw_subset,
    "imagefolder": _imagefolder,
    "cifar10": _cifar10,
}

"""The data sets a spec can name, each loaded as an ``ImageSet``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fedsim.clients.data.celeba import load_celeba
from fedsim.clients.data.cifar import load_cifar10, load_cifar100
from fedsim.clients.data.folders import load_tree
from fedsim.clients.data.hub import PREFIX, load_hub
from fedsim.clients.data.imagenet import load_imagenet
from fedsim.clients.data.mnist import load_mnist
from fedsim.clients.data.photos import LfwSubset, Photos
from fedsim.clients.data.pictures import ImageSet
from fedsim.core.errors import DataError, did_you_mean
from fedsim.core.spec import DataSpec

__all__ = ["ImageSet", "Split", "dataset_names", "load_images"]

Split = Literal["train", "test"]
HUB = f"{PREFIX}<name>"
LABELLED = ("celeba", "cifar100", HUB)  # that have more than one thing to learn


def load_images(data: DataSpec, split: Split) -> ImageSet:
    """One split of the data set that ``data`` names; no picture is held until it is asked for."""
    name = HUB if data.name.startswith(PREFIX) else data.name
    if name not in _LOADERS:
        raise DataError(
            f"there is no data set '{data.name}'{did_you_mean(data.name, _LOADERS)}; "
            f"known: {', '.join(dataset_names())}."
        )
    if data.label is not None and name not in LABELLED:
        raise DataError(
            f"data.label is '{data.label}', but {name} has one kind of label only; leave it out "
            f"(it is for {', '.join(LABELLED)})."
        )
    return _LOADERS[name](data, split)


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


def _cifar100(data: DataSpec, split: Split) -> ImageSet:
    where = _path(data, "the folder cifar-100-python, a tree split/class/picture.jpg or its zips")
    return load_cifar100(where, split, data.image_size, data.label)


def _mnist(data: DataSpec, split: Split) -> ImageSet:
    return load_mnist(_path(data, "the folder of its four idx files"), split, data.image_size)


def _imagenet(data: DataSpec, split: Split) -> ImageSet:
    where = _path(data, "the folder above train/ and val/, or of folders by synset id")
    return load_imagenet(where, split, data.image_size)


def _celeba(data: DataSpec, split: Split) -> ImageSet:
    where = _path(data, "the folder of img_align_celeba and its lists")
    return load_celeba(where, split, data.image_size, data.label)


def _hub(data: DataSpec, split: Split) -> ImageSet:
    return load_hub(data.name, data.path, split, data.image_size, data.label)


def _path(data: DataSpec, what: str) -> str:
    if not data.path:
        raise DataError(f"data.path is needed for {data.name}: give {what}.")
    return data.path


_LOADERS: dict[str, Callable[[DataSpec, Split], ImageSet]] = {
    "photos": _photos,
    "lfw_subset": _lfw_subset,
    "imagefolder": _imagefolder,
    "imagenet": _imagenet,
    "celeba": _celeba,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "mnist": _mnist,
    HUB: _hub,
}

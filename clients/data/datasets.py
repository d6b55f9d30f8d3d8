"""The data sets a spec can name, each loaded as an ``ImageSet``.

A data set is a function of the spec's data section and the split, or a class made in the same way.
To add one, write the file and add its line here, or name it by its import path
``package.module:load``.
"""

from __future__ import annotations

import numpy as np

from fedsim.clients.data.hub import PREFIX
from fedsim.clients.data.pictures import ImageSet, Split
from fedsim.core.errors import DataError, FedsimError, SpecError, did_you_mean
from fedsim.core.registry import find
from fedsim.core.spec import DataSpec

__all__ = ["DATASETS", "ImageSet", "Split", "dataset_names", "known_as", "load_images"]

_HUB = f"{PREFIX}<name>"

DATASETS: dict[str, str] = {
    "celeba": "fedsim.clients.data.celeba:load_celeba",
    "cifar10": "fedsim.clients.data.cifar:load_cifar10",
    "cifar100": "fedsim.clients.data.cifar:load_cifar100",
    _HUB: "fedsim.clients.data.hub:load_hub",
    "imagefolder": "fedsim.clients.data.folders:load_imagefolder",
    "imagenet": "fedsim.clients.data.imagenet:load_imagenet",
    "lfw_subset": "fedsim.clients.data.photos:LfwSubset",
    "mnist": "fedsim.clients.data.mnist:load_mnist",
    "photos": "fedsim.clients.data.photos:Photos",
}
_LABELLED = ("celeba", "cifar100", _HUB)  # those with more than one kind of label


def load_images(data: DataSpec, split: Split) -> ImageSet:
    """One split of the data set that ``data`` names; no picture is held until it is asked for."""
    name = _HUB if data.name.startswith(PREFIX) else data.name
    if name not in DATASETS:
        return _load_authors(data, split)
    if data.label is not None and name not in _LABELLED:
        raise DataError(
            f"data.label is '{data.label}', but {name} has one kind of label only; leave it out "
            f"(it is for {', '.join(_LABELLED)})."
        )
    images: ImageSet = find("data set", DATASETS, name)(data, split)
    return images


def dataset_names() -> list[str]:
    """What ``data.name`` may be, beside import paths."""
    return sorted(DATASETS)


def known_as(name: str) -> str:
    """The short name of a built-in data set, which may also be named by its import path."""
    return next((known for known, path in DATASETS.items() if path == name), name)


def _load_authors(data: DataSpec, split: Split) -> ImageSet:
    """A data set by its import path; whatever is wrong with it becomes one sentence."""
    if ":" not in data.name:
        raise DataError(
            f"there is no data set '{data.name}'{did_you_mean(data.name, DATASETS)}; "
            f"known: {', '.join(dataset_names())}; or give an import path 'package.module:load'."
        )
    try:
        load = find("data set", DATASETS, data.name)
    except SpecError as error:
        raise DataError(str(error)) from error
    if not callable(load):
        raise DataError(f"the data set '{data.name}' is no function of (data, split).")
    try:
        images = load(data, split)
    except FedsimError:
        raise
    except Exception as error:  # somebody's own code may fail in any way
        raise DataError(
            f"the data set '{data.name}' cannot be loaded: {type(error).__name__}: {error}."
        ) from error
    if not isinstance(images, ImageSet):
        raise DataError(
            f"the data set '{data.name}' gave a {type(images).__name__}; it must give an ImageSet "
            f"(fedsim.clients.data.ImageSet)."
        )
    _check_labels(data.name, images)
    return images


def _check_labels(name: str, images: ImageSet) -> None:
    labels, classes = getattr(images, "labels", None), getattr(images, "classes", ())
    numbers = labels if isinstance(labels, np.ndarray) else np.empty(0)
    whole = numbers.ndim == 1 and numbers.dtype.kind in "iu" and len(numbers) > 0
    if not whole or not 0 <= numbers.min() <= numbers.max() < len(classes):
        raise DataError(
            f"the data set '{name}' must have classes, and labels that number them from 0: an "
            f"array of whole numbers, one for each picture."
        )

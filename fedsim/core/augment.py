"""Augmentation: torchvision's transforms, by name, on the pictures that a client learns from.

What is applied and with which parameters is announced; how the coin fell is the client's secret.
Transforms of a single picture come first, each picture with a coin of its own; those that mix a
batch (MixUp, CutMix) come after them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedsim.core.errors import SpecError, did_you_mean
from fedsim.core.seeds import seed_from

MIXERS = ("CutMix", "MixUp")
CHOICES = ("RandomApply", "RandomChoice", "RandomOrder", "Compose")  # of ``transforms`` in them
# Of torchvision's, what no step of training on labelled pictures can be, and what to say instead.
REFUSED = {
    "Normalize": "data.mean and data.std say how pictures are normalised",
    "Lambda": "no spec can hold a function",
    "LinearTransformation": "no spec can hold its matrix",
    "FiveCrop": "it makes several pictures of one",
    "TenCrop": "it makes several pictures of one",
}
_SLACK = 1e-3  # beyond [0, 1] that rounding explains
_TRIES = 32  # of a transform before a round runs: it may leave most pictures alone


class Shown(NamedTuple):
    """A batch as the model sees it: images (B, 3, H, W) in [0, 1], and of which pictures each is
    mixed, (B, B) with rows that sum to one; None where nothing is mixed."""

    images: Tensor
    mixing: Tensor | None


@dataclass(frozen=True)
class Augmentation:
    """Transforms in the order in which they act."""

    single: Sequence[Any]
    mixing: Sequence[Any]

    @classmethod
    def of(cls, components: Sequence[Mapping[str, Any]], side: int) -> Augmentation:
        """The transforms that these mappings name, for pictures of ``side``."""
        built = [_built(component, side) for component in components]
        mixes = [_mixes(component) for component in components]
        if sorted(mixes) != mixes:
            late = components[len(mixes) - 1 - mixes[::-1].index(False)]["name"]
            raise SpecError(
                f"train.augment: {late} acts on single pictures; list it before what mixes a batch."
            )
        first = mixes.index(True) if True in mixes else len(built)
        return cls(built[:first], built[first:])

    def __call__(self, images: Tensor, seed: str) -> Shown:
        """One batch, its coins drawn by ``seed``."""
        with torch.random.fork_rng(devices=[]):
            shown = [self._one(image, f"{seed} picture {at}") for at, image in enumerate(images)]
            pictures, mixing = torch.stack(shown), None
            if self.mixing:
                torch.manual_seed(seed_from(f"{seed} mixing"))
                mixing = torch.eye(len(pictures))  # each picture a class of its own
                for transform in self.mixing:
                    pictures, mixing = transform(pictures, mixing)
        return Shown(pictures.clamp(0, 1), mixing)

    def _one(self, picture: Tensor, seed: str) -> Tensor:
        torch.manual_seed(seed_from(seed))
        image = picture
        for transform in self.single:
            image = transform(image)
        if image.shape != picture.shape:  # one that is left alone most of the time
            raise SpecError(
                f"train.augment makes {tuple(image.shape)} of a picture of {tuple(picture.shape)}; "
                f"data.image_size says how large pictures are."
            )
        return image


def check_augmentation(components: Sequence[Mapping[str, Any]], side: int) -> None:
    """Refuse a transform that does not exist, does not take its parameters, or does not make one
    picture of one picture, before a round runs; each is tried with several coins, always the same.
    """
    grey = torch.linspace(0, 1, side).expand(1, 3, side, side).contiguous()
    augmentation = Augmentation.of(components, side)
    singles = [c["name"] for c in components][: len(augmentation.single)]
    for name, transform in zip(singles, augmentation.single, strict=True):
        with torch.random.fork_rng(devices=[]):
            for coin in range(_TRIES):
                torch.manual_seed(coin)
                _refuse_unfit(name, transform, grey[0])


def _refuse_unfit(name: str, transform: Any, picture: Tensor) -> None:
    """Raise where a transform, as its coin falls, does not make a picture of a picture."""
    try:
        shown = transform(picture)
    except Exception as error:  # whatever a transform says of pictures that it cannot take
        raise SpecError(
            f"train.augment: {name} does not take a picture: {_said(error)}."
        ) from error
    if not isinstance(shown, Tensor) or shown.shape != picture.shape:
        found = tuple(shown.shape) if isinstance(shown, Tensor) else type(shown).__name__
        raise SpecError(
            f"train.augment: {name} makes {found} of a picture of {tuple(picture.shape)}; "
            f"data.image_size says how large pictures are."
        )
    if not shown.is_floating_point() or not _in_range(shown):
        raise SpecError(
            f"train.augment: {name} leaves the range [0, 1] that pictures are given in."
        )


def _said(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")


def _in_range(image: Tensor) -> bool:
    return float(image.min()) >= -_SLACK and float(image.max()) <= 1 + _SLACK


def mixes(components: Sequence[Mapping[str, Any]]) -> bool:
    """Whether among these transforms there is one that mixes the pictures of a batch."""
    return any(map(_mixes, components))


def _mixes(component: Mapping[str, Any]) -> bool:
    """Whether a transform mixes a batch, all of it."""
    inner = component.get("transforms")
    if component.get("name") not in CHOICES or not isinstance(inner, list):
        return component.get("name") in MIXERS
    kinds = {_mixes(_named(one)) for one in inner}
    if len(kinds) > 1:
        raise SpecError(
            f"train.augment: {component['name']} has transforms of single pictures and of batches; "
            f"choose among one kind."
        )
    return kinds == {True}


def _named(one: Any) -> Mapping[str, Any]:
    """A transform inside another: a mapping, or its name alone."""
    return one if isinstance(one, Mapping) else {"name": one}


def _built(component: Mapping[str, Any], side: int) -> Any:
    """The transform that a mapping names; where one wants a size and is given none, pictures keep
    theirs."""
    from torchvision.transforms import v2

    name = str(component.get("name"))
    known = [n for n, t in vars(v2).items() if inspect.isclass(t) and issubclass(t, v2.Transform)]
    known = sorted({*known, *MIXERS} - {"Transform", *REFUSED})
    if name in REFUSED:
        raise SpecError(f"train.augment: {name} does not belong here: {REFUSED[name]}.")
    if name not in known:
        raise SpecError(
            f"train.augment: torchvision has no transform '{name}'{did_you_mean(name, known)}."
        )
    make = getattr(v2, name)
    accepted = inspect.signature(make).parameters
    params = {key: value for key, value in component.items() if key != "name"}
    for key, value in params.items():
        if key not in accepted or key in ("num_classes", "labels_getter"):
            allowed = [n for n in accepted if n not in ("num_classes", "labels_getter")]
            raise SpecError(
                f"train.augment: {name} has no parameter '{key}'{did_you_mean(key, allowed)}; it "
                f"has {', '.join(allowed) or 'none'}."
            )
        params[key] = _value(key, value, accepted[key].default, side)
    if "size" in accepted and "size" not in params:
        params["size"] = side
    try:
        return make(**params)
    except Exception as error:  # whatever a transform says of numbers that it cannot take
        raise SpecError(
            f"train.augment: {name} does not take its parameters: {_said(error)}."
        ) from error


def _value(key: str, value: Any, default: Any, side: int) -> Any:
    """A parameter as torchvision takes it: transforms inside, and names in the place of enums."""
    if key == "transforms" and isinstance(value, list):
        return [_built(_named(one), side) for one in value]
    if isinstance(default, Enum) and isinstance(value, str):
        kind = type(default)
        known = [str(one.value) for one in kind]
        if value not in known:
            raise SpecError(
                f"train.augment: there is no {key} '{value}'{did_you_mean(value, known)}."
            )
        return kind(value)
    return value

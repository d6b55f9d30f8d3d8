"""Undeclared: what a witness saw that is not what was declared.

A replay of the true batches may well give the update all the same, because it takes what was seen
and not what was declared. An attack has nothing else than the declaration: it would look for other
pictures in other batches, and that it finds none would say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedsim.core.observation import Observation, Public
from fedsim.core.vault import Truth

# By which pictures in [0, 1] are normalised, as people do it.
NORMALISATIONS = {
    "ImageNet's": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "CIFAR-10's": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "CIFAR-10's older": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "CIFAR-100's": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "halves": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}

# Of all numbers in the pictures of a witness, this share may lie outside [0, 1] (erased patches).
OUTSIDE, _BEYOND = 0.1, 0.01
_SPREAD = 0.5  # from the darkest number to the brightest: less may be one that is all bright
_FEW = 10  # pictures, of which as many copies often come one after the other
COUNT = "the number of examples in the replies"


class Undeclared(NamedTuple):
    """A field, what was declared, and what the witness saw instead."""

    field: str
    declared: str
    seen: str


def undeclared(observation: Observation, truth: Truth) -> Undeclared | None:
    """What the witness saw otherwise than it was declared; None where nothing is."""
    public = observation.public
    return _miscounted(public, observation.update.num_examples, truth) or _misnormalised(
        truth.images, public.protocol.mean, public.protocol.std
    )


def _miscounted(public: Public, num_examples: int, truth: Truth) -> Undeclared | None:
    """Batches, epochs and examples."""
    sizes, batch = [len(rows) for rows in truth.batches], public.batch_size
    if public.local_steps and not public.local_epochs and len(sizes) != public.local_steps:
        return Undeclared("train.local_steps", str(public.local_steps), str(len(sizes)))
    # A client with less than a batch has smaller ones, and so has the end of an epoch.
    if max(sizes) > batch or (max(sizes) < batch and len(set(sizes)) > 1):
        return Undeclared("train.batch_size", str(batch), str(max(sizes)))
    if not public.local_epochs:
        return None
    declared, examples = public.local_epochs, sum(sizes)
    told = max(num_examples, declared)  # where nobody counts, an attack takes it for one picture
    if not public.protocol.augment:
        epochs = _epochs(truth, agreed=examples == told)
        # Pictures that are others in every epoch were seen once, and as many as are counted.
        if epochs == 1 and declared > 1 and examples * declared != told:
            epochs = None
        if epochs is not None and epochs != declared:
            return Undeclared("train.local_epochs", str(declared), str(epochs))
    if examples == told:
        pictures = examples // declared
        smaller = len(sizes) > declared * -(-pictures // batch)
        return Undeclared("train.batch_size", str(batch), str(max(sizes))) if smaller else None
    each = told // declared
    if set(sizes) == {batch} and examples == declared * (each - each % batch):
        return Undeclared("train.drop_last", "false", "true")
    return Undeclared(COUNT, str(num_examples // declared or "none"), str(examples // declared))


def _epochs(truth: Truth, *, agreed: bool) -> int | None:
    """How often the pictures were gone over, each time all of them and once; None where they were
    not. ``agreed``: as many as are counted. Then a picture that comes twice may be two that are
    alike, unless more of them come in another order than do so by chance."""
    rows = [row for batch in truth.batches for row in batch]
    count = len(truth.images)
    each = [tuple(rows[at : at + count]) for at in range(0, len(rows), count)]
    if any(len(set(one)) != count for one in each):
        return None
    chance = len(set(each)) == 1 or count < _FEW
    return None if agreed and len(each) > 1 and chance else len(each)


def _misnormalised(
    images: Tensor, mean: Sequence[float], std: Sequence[float]
) -> Undeclared | None:
    """By what pictures rather were normalised. They are bytes before that: on which grid they lie
    cannot be a coincidence. Where they were changed since, that many of their numbers lie outside
    [0, 1] tells at least that they were not normalised as declared, and that none of them was below
    zero that they were not normalised at all."""
    said = f"mean {_numbers(mean)} and std {_numbers(std)}"
    if _on_levels(images[:64].double() * 255):
        return None
    raw = (images[:64].double() - _channelled(mean)) / _channelled(std)
    for name, (other, spread) in NORMALISATIONS.items():
        if _on_levels((raw * _channelled(spread) + _channelled(other)) * 255):
            rather = f"{name} (mean {_numbers(other)}, std {_numbers(spread)})"
            return Undeclared("data.mean and data.std", said, rather)
    least, most = float(raw.min()), float(raw.max())
    if least >= 0 and most <= 1 and most - least > _SPREAD:
        return Undeclared("data.mean and data.std", said, "none (pictures as they are)")
    outside = (images < -_BEYOND) | (images > 1 + _BEYOND)
    if float(outside.double().mean()) > OUTSIDE:
        return Undeclared("data.mean and data.std", said, "others")
    return None


def _on_levels(levels: Tensor) -> bool:
    rounded = levels.round()
    near = bool((levels - rounded).abs().max() < 2e-3)
    return near and bool(rounded.min() >= 0) and bool(rounded.max() <= 255)


def _channelled(colour: Sequence[float]) -> Tensor:
    return torch.tensor(colour, dtype=torch.float64).view(1, -1, 1, 1)


def _numbers(colour: Sequence[float]) -> str:
    return f"({', '.join(f'{one:g}' for one in colour)})"

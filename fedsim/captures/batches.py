"""Batches: pictures and labels in what anybody's data loader yields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

IMAGES = ("img", "image", "pixel_values", "images", "imgs", "x", "input", "inputs", "data")
LABELS = ("label", "labels", "fine_label", "y", "target", "targets", "class")

CHANNELS = (1, 3, 4)


class Seen(NamedTuple):
    """A batch: pictures (B, C, H, W) as the model is given them, labels (B,), or (B, K) where each
    is a mixture of classes."""

    images: Tensor
    labels: Tensor


def seen_in(batch: Any) -> Seen:
    """The pictures and labels of a batch, a pair or a mapping of them; a ValueError for another."""
    if isinstance(batch, Mapping):
        pair = _of(batch, IMAGES, "pictures"), _of(batch, LABELS, "labels")
    elif isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) >= 2:
        pair = batch[0], batch[1]
    else:
        raise ValueError(f"a {type(batch).__name__} is no pair and no mapping")
    images, labels = (_tensor(part) for part in pair)
    if images.ndim != 4 or (images.shape[1] not in CHANNELS and images.shape[3] in CHANNELS):
        raise ValueError(f"its pictures are of shape {tuple(images.shape)}, not (B, C, H, W)")
    if len(labels) != len(images):
        raise ValueError(f"its labels are of shape {tuple(labels.shape)}")
    return Seen(images, _classes(labels))


def _classes(labels: Tensor) -> Tensor:
    """Labels (B,) as classes, whatever numbers they are written in, or mixtures (B, K) as they
    are; a ValueError for others."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 2 and labels.is_floating_point():
        return labels
    if labels.ndim == 2:  # one of K in whole numbers
        if not (bool((labels.sum(1) == 1).all()) and bool((labels != 0).sum(1).eq(1).all())):
            raise ValueError("its labels are of several classes at once")
        return labels.int().argmax(1)
    if labels.ndim != 1:
        raise ValueError(f"its labels are of shape {tuple(labels.shape)}")
    whole = labels.long()
    if not bool((whole == labels).all()) or bool((whole < 0).any()):
        raise ValueError("its labels are no classes, which are whole numbers from 0")
    return whole


def _of(batch: Mapping[Any, Any], names: Sequence[str], what: str) -> Any:
    for name in names:
        if name in batch:
            return batch[name]
    raise ValueError(f"it has no {what}: its keys are {', '.join(map(str, batch))}")


def _tensor(part: Any) -> Tensor:
    if isinstance(part, Tensor):
        return part.detach()
    return torch.stack(part).detach() if _are_tensors(part) else torch.as_tensor(part)


def _are_tensors(part: Any) -> bool:
    return isinstance(part, list | tuple) and all(isinstance(one, Tensor) for one in part)

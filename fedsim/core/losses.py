"""Losses: cross-entropy as people train with it, announced to clients and server alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from fedsim.core.errors import SpecError

Weight = Annotated[float, Field(ge=0)]
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Loss:
    """Cross-entropy. ``label_smoothing`` takes a share of each label and spreads it over all
    classes; ``weights`` count classes differently, ``balanced`` by how often a client's own shard
    has them, which the client alone knows; ``soft``: labels that MixUp or CutMix mixed are learned
    as the mixture, or as their ``dominant`` class alone."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weights: tuple[Weight, ...] | Literal["balanced"] | None = None
    soft: Literal["mixed", "dominant"] = "mixed"

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss (scalar) of logits (B, C) and labels: classes (B,) or probabilities (B, C).
        Whoever does not know what ``balanced`` weights are takes them for equal."""
        if logits.dtype in _HALF:
            logits = logits.float()
        if self.soft == "dominant":
            labels = dominant(labels)
        weights = self.class_weights(logits)
        return F.cross_entropy(logits, labels, weights, label_smoothing=self.label_smoothing)

    @property
    def known_weights(self) -> tuple[float, ...] | None:
        """The weights of the classes, where they are announced."""
        return None if self.weights == "balanced" else self.weights

    def class_weights(self, like: Tensor) -> Tensor | None:
        """The weights (C,), of the type of ``like``; None where all classes count the same."""
        if self.known_weights is None:
            return None
        return torch.tensor(self.known_weights, dtype=like.dtype, device=like.device)

    def balanced_by(self, weights: tuple[float, ...]) -> Loss:
        """The same with the weights of one client in the place of ``balanced``."""
        return replace(self, weights=weights) if weights and self.weights == "balanced" else self


def refuse_other_classes(loss: Loss, classes: int) -> None:
    """Raise where weights are announced for another number of classes than there are."""
    weights = loss.known_weights
    if weights is not None and len(weights) != classes:
        raise SpecError(
            f"train.loss.weights has {len(weights)} numbers, and the data set has {classes} "
            f"classes; give one for each, or balanced."
        )
    if weights is not None and not any(weights):
        raise SpecError("train.loss.weights are all zero: there would be nothing to learn.")


def dominant(labels: Tensor) -> Tensor:
    """Classes (B,), of mixtures (B, C) the largest."""
    return labels.argmax(-1) if labels.is_floating_point() else labels


def balanced_weights(counts: Tensor) -> tuple[float, ...]:
    """The weights that give every class the same say, from how often each is there: all samples,
    by the classes, by the samples of each; a class that is not there counts as if it were once."""
    total = float(counts.sum())
    return tuple(total / (len(counts) * counts.double().clamp(min=1)).numpy())

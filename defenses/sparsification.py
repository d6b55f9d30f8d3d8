"""Sparsification, top-k or random: k numbers per layer, and what becomes of the rest."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.core.defense import Defense, Informed
from fedsim.core.learning import Update

_INDEX_BYTES = 4  # where a number belongs, beside the number itself


@dataclass(frozen=True)
class Sparsification(Defense):
    """``sparsity``: the share of every layer that becomes zero; at least one number per layer
    stays. ``feedback``: what was left out is added to the client's next update (error feedback)."""

    sparsity: Annotated[float, Field(ge=0, lt=1)] = 0.9
    feedback: bool = False
    left_out: ClassVar[Mapping[str, Tensor]] = {}  # what the client still owes, by tensor

    @abstractmethod
    def sparse(self, tensor: Tensor, rng: torch.Generator) -> Tensor:
        """The tensor with exactly `kept` of its numbers."""

    def recall(self, kept_back: Mapping[str, Tensor]) -> Sparsification:
        recalled = copy.copy(self)
        object.__setattr__(recalled, "left_out", dict(kept_back) if self.feedback else {})
        return recalled

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        whole = self._owed(update)
        return replace(update, tensors={n: self.sparse(t, rng) for n, t in whole.items()})

    def keep_back(self, before: Update, after: Update) -> dict[str, Tensor]:
        if not self.feedback:
            return {}
        return {n: t - after.tensors[n] for n, t in self._owed(before).items()}

    def counter(self, seen: Informed, model: nn.Module) -> Informed:
        """What is zero was not uploaded: match the rest alone."""
        return replace(seen, masked=True)

    def encoded_bytes(self, update: Update) -> int:
        return sparse_bytes(update)

    def _owed(self, update: Update) -> dict[str, Tensor]:
        rest = self.left_out
        return {n: t + rest[n].to(t) if n in rest else t for n, t in update.tensors.items()}


def kept(flat: Tensor, sparsity: float) -> int:
    """How many numbers of a layer stay; one at least."""
    return max(1, round((1 - sparsity) * flat.numel()))


def sparse_bytes(update: Update) -> int:
    """Numbers and their places, or the dense tensor where that is shorter."""
    total = 0
    for tensor in update.tensors.values():
        width = tensor.element_size()
        sparse = int(torch.count_nonzero(tensor)) * (width + _INDEX_BYTES)
        total += min(sparse, tensor.numel() * width)
    return total

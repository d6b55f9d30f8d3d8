"""Top-k sparsification: of every layer only the largest numbers are uploaded (Aji, Heafield 2017).

Made to save bytes; as a defense it leaves an attacker fewer equations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.core.defense import Defense, Informed
from fedsim.core.learning import Update


@dataclass(frozen=True)
class TopK(Defense):
    """``sparsity``: the share of every layer that becomes zero; one number a layer stays."""

    sparsity: Annotated[float, Field(ge=0, lt=1)] = 0.9

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        return replace(update, tensors={n: self._sparse(t) for n, t in update.tensors.items()})

    def counter(self, seen: Informed, model: nn.Module) -> Informed:
        """What is zero was not uploaded: match the rest alone."""
        return replace(seen, masked=True)

    def _sparse(self, tensor: Tensor) -> Tensor:
        flat = tensor.flatten()
        places = flat.abs().topk(kept(flat, self.sparsity)).indices
        return torch.zeros_like(flat).index_copy(0, places, flat[places]).view_as(tensor)


def kept(flat: Tensor, sparsity: float) -> int:
    """How many numbers of a layer stay; one at least."""
    return max(1, round((1 - sparsity) * flat.numel()))

"""Random sparsification: of every layer a random part of the numbers is uploaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from defenses.top_k import kept
from fedsim.core.defense import Defense, Informed
from fedsim.core.learning import Update


@dataclass(frozen=True)
class RandomK(Defense):
    """``sparsity``: the share of every layer that becomes zero; ``rescale`` makes what stays
    larger by as much, so that the update keeps its mean."""

    sparsity: Annotated[float, Field(ge=0, lt=1)] = 0.9
    rescale: bool = False

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        return replace(update, tensors={n: self._sparse(t, rng) for n, t in update.tensors.items()})

    def counter(self, seen: Informed, model: nn.Module) -> Informed:
        """What is zero was not uploaded: match the rest alone."""
        return replace(seen, masked=True)

    def _sparse(self, tensor: Tensor, rng: torch.Generator) -> Tensor:
        flat = tensor.flatten()
        count = kept(flat, self.sparsity)
        places = torch.randperm(len(flat), generator=rng)[:count].to(flat.device)
        scale = len(flat) / count if self.rescale else 1.0
        return torch.zeros_like(flat).index_copy(0, places, scale * flat[places]).view_as(tensor)

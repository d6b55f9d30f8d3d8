"""Random sparsification: of every layer a random part of the numbers is uploaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.defenses.sparsification import Sparsification, kept


@dataclass(frozen=True)
class RandomK(Sparsification):
    """``rescale`` makes what stays larger by as much as was left out, so that the update keeps its
    mean; not with ``feedback``, which makes up for it later."""

    rescale: bool = False

    def sparse(self, tensor: Tensor, rng: torch.Generator) -> Tensor:
        flat = tensor.flatten()
        count = kept(flat, self.sparsity)
        places = torch.randperm(len(flat), generator=rng)[:count].to(flat.device)
        scale = len(flat) / count if self.rescale and not self.feedback else 1.0
        return torch.zeros_like(flat).index_copy(0, places, scale * flat[places]).view_as(tensor)

"""Clipping: the whole update scaled down to a norm, as most privacy mechanisms begin.

Alone it hides how large an update is and nothing else: a direction can still be matched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field

from fedsim.core.defense import Defense
from fedsim.core.learning import Update

Norm = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Clipping(Defense):
    """``norm``: the largest l2 norm of an update, over all layers; ``norms``: that of each round,
    where it changes (the last one holds on)."""

    norm: Norm = 1.0
    norms: tuple[Norm, ...] = ()

    def at_round(self, round_: int, client: int, cohort: Sequence[int]) -> Clipping:
        if not self.norms:
            return self
        return replace(self, norm=self.norms[min(round_, len(self.norms)) - 1], norms=())

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        norms = torch.stack([torch.linalg.vector_norm(t) for t in update.tensors.values()])
        scale = (self.norm / torch.linalg.vector_norm(norms).clamp(min=1e-30)).clamp(max=1.0)
        return replace(update, tensors={n: t * scale for n, t in update.tensors.items()})

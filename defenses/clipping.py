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
    where it changes (the last one holds on). ``everything``: all that travels is clipped as one, as
    Flower's mods do it: the moves of BatchNorm's buffers as well, and what has no dimension, such
    as a counter, adds to the norm and is left as it is."""

    norm: Norm = 1.0
    norms: tuple[Norm, ...] = ()
    everything: bool = False

    def at_round(self, round_: int, client: int, cohort: Sequence[int]) -> Clipping:
        if not self.norms:
            return self
        return replace(self, norm=self.norms[min(round_, len(self.norms)) - 1], norms=())

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        moved = update.moved if self.everything else {}
        every = [*update.tensors.values(), *(move.float() for move in moved.values())]
        norms = torch.stack([torch.linalg.vector_norm(tensor) for tensor in every])
        scale = (self.norm / torch.linalg.vector_norm(norms).clamp(min=1e-30)).clamp(max=1.0)
        kept = {n: move * scale for n, move in moved.items() if move.ndim}
        buffers = {n: update.buffers[n] - moved[n] + move for n, move in kept.items()}
        return replace(
            update,
            tensors={
                n: t if self.everything and not t.ndim else t * scale
                for n, t in update.tensors.items()
            },
            buffers={**update.buffers, **buffers},
            moved={**update.moved, **kept},
        )

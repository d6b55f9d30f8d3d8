"""Clipping: the whole update scaled down to a norm, as most privacy mechanisms begin.

Alone it hides how large an update is and nothing else: a direction can still be matched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field

from fedsim.core.defense import Defense
from fedsim.core.learning import Update


@dataclass(frozen=True)
class Clipping(Defense):
    """``norm``: the largest l2 norm of an update, over all layers."""

    norm: Annotated[float, Field(gt=0)] = 1.0

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        norms = torch.stack([torch.linalg.vector_norm(t) for t in update.tensors.values()])
        scale = (self.norm / torch.linalg.vector_norm(norms).clamp(min=1e-30)).clamp(max=1.0)
        return replace(update, tensors={n: t * scale for n, t in update.tensors.items()})

"""Gaussian noise on the update: hides detail, costs accuracy in proportion."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedsim.core.defense import Defense
from fedsim.core.learning import Update


@dataclass(frozen=True)
class GaussianNoise(Defense):
    """Adds N(0, s^2) to every number: s = ``std``, or ``std`` times the tensor's RMS where
    ``relative``. No privacy budget is claimed: nothing is clipped."""

    std: Annotated[float, Field(ge=0)] = 1e-3
    relative: bool = False

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        return replace(update, tensors={n: self._noisy(t, rng) for n, t in update.tensors.items()})

    def _noisy(self, tensor: Tensor, rng: torch.Generator) -> Tensor:
        # Drawn on the CPU, so that the same seed is the same noise on every device.
        noise = torch.randn(tensor.shape, generator=rng).to(tensor)
        scale = tensor.square().mean().sqrt() if self.relative else 1.0
        return tensor + self.std * scale * noise

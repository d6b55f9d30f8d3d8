"""Laplace noise on the update: as `gaussian_noise`, with heavier tails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedsim.core.defense import Defense
from fedsim.core.learning import Update


@dataclass(frozen=True)
class LaplaceNoise(Defense):
    """Adds Laplace noise to every number, of the standard deviation ``std``, or ``std`` times the
    tensor's RMS where ``relative``. No privacy budget is claimed: nothing is clipped."""

    std: Annotated[float, Field(ge=0)] = 1e-3
    relative: bool = False

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        return replace(update, tensors={n: self._noisy(t, rng) for n, t in update.tensors.items()})

    def _noisy(self, tensor: Tensor, rng: torch.Generator) -> Tensor:
        noise = laplace(tensor.shape, rng) / 2**0.5  # its deviation is sqrt(2) times its scale
        scale = tensor.square().mean().sqrt() if self.relative else 1.0
        return tensor + self.std * scale * noise.to(tensor)


def laplace(shape: Sequence[int], rng: torch.Generator) -> Tensor:
    """Numbers of Laplace's distribution, of the scale one, by its inverse; drawn on the CPU."""
    uniform = torch.rand(shape, generator=rng).sub(0.5).clamp(-0.4999999, 0.4999999)
    return -uniform.sign() * torch.log1p(-2 * uniform.abs())

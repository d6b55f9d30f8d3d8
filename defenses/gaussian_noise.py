"""Gaussian noise on the update: hides detail, costs accuracy in proportion."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedsim.core.defense import Defense
from fedsim.core.learning import Update


@dataclass(frozen=True)
class GaussianNoise(Defense):
    """Adds N(0, s^2) to every number: s = ``std``, or ``std`` times the RMS of its tensor where
    ``relative``, or of the whole update where ``relative`` is "update". ``sparse`` leaves zeros
    alone, which a sparsification before it does not upload, and takes the RMS of the others. No
    privacy budget is claimed: nothing is clipped."""

    std: Annotated[float, Field(ge=0)] = 1e-3
    relative: bool | Literal["update"] = False
    sparse: bool = False

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        whole = self._rms(torch.cat([t.flatten() for t in update.tensors.values()]))
        return replace(
            update, tensors={n: self._noisy(t, whole, rng) for n, t in update.tensors.items()}
        )

    def without_noise(self) -> tuple[Defense, float] | None:
        return None if self.relative or self.sparse else (Defense(), self.std)

    def _noisy(self, tensor: Tensor, whole: Tensor, rng: torch.Generator) -> Tensor:
        # Drawn on the CPU, so that the same seed is the same noise on every device.
        noise = torch.randn(tensor.shape, generator=rng).to(tensor)
        if self.sparse:
            noise = noise * (tensor != 0)
        scale = whole if self.relative == "update" else self._rms(tensor) if self.relative else 1.0
        return tensor + self.std * scale * noise

    def _rms(self, tensor: Tensor) -> Tensor:
        numbers = tensor[tensor != 0] if self.sparse else tensor
        return numbers.square().mean().sqrt() if numbers.numel() else tensor.new_zeros(())

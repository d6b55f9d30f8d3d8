"""Quantization: every number of the update in a few bits, scaled by its tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedsim.core.defense import Defense
from fedsim.core.learning import Update


@dataclass(frozen=True)
class Quantization(Defense):
    """``kind`` int8: 255 levels up to the tensor's largest number; sign: one bit a number, at the
    tensor's mean size (signSGD with a scale)."""

    kind: Literal["int8", "sign"] = "int8"

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        return replace(update, tensors={n: self._coarse(t) for n, t in update.tensors.items()})

    def _coarse(self, tensor: Tensor) -> Tensor:
        if self.kind == "sign":
            return tensor.sign() * tensor.abs().mean()
        step = tensor.abs().max().clamp(min=1e-30) / 127
        return (tensor / step).round() * step

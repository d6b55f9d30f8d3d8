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
    """``kind`` int8: 255 levels up to the tensor's largest number; sign: one bit per number, at the
    tensor's mean size (signSGD with a scale)."""

    kind: Literal["int8", "sign"] = "int8"

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        return replace(update, tensors={n: self._coarse(t) for n, t in update.tensors.items()})

    def encoded_bytes(self, update: Update) -> int | None:
        """8 bits or one bit per number, and a scale for each tensor."""
        tensors = update.tensors.values()
        if not all(t.is_floating_point() for t in tensors):  # masked since: no levels are left
            return None
        bits = {"int8": 8, "sign": 1}[self.kind]
        return sum(-(-t.numel() * bits // 8) + 4 for t in tensors)

    def _coarse(self, tensor: Tensor) -> Tensor:
        if self.kind == "sign":
            return tensor.sign() * tensor.abs().mean()
        step = tensor.abs().max().clamp(min=1e-30) / 127
        return (tensor / step).round() * step

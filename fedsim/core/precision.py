"""Precision: in which numbers a client computes, and in which it uploads."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["float32", "bfloat16", "float16"]
HALF = (torch.bfloat16, torch.float16)

_SCALE = 2.0**16  # of a loss in float16, as torch's GradScaler begins


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Where a forward pass computes in ``precision``, with weights kept in float32."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))


def gradients(loss: Tensor, weights: Sequence[Tensor], precision: Precision) -> list[Tensor | None]:
    """The gradients of a loss; None for a weight that it does not use. In float16 small numbers
    are lost on the way back, so the loss is scaled up for it, as far as all numbers stay finite.
    """
    if not loss.requires_grad:
        return [None for _ in weights]  # of a part that this batch goes past
    scale = _SCALE if precision == "float16" else 1.0
    while True:
        found = torch.autograd.grad(
            loss * scale if scale > 1 else loss, weights, allow_unused=True, retain_graph=scale > 1
        )
        if scale <= 1 or all(bool(torch.isfinite(g).all()) for g in found if g is not None):
            break
        scale /= 4
    return [g if g is None or scale <= 1 else g / scale for g in found]


def stored(tensors: Mapping[str, Tensor], precision: Precision) -> dict[str, Tensor]:
    """Numbers as they are uploaded; whole numbers, such as masks make, stay as they are."""
    dtype = getattr(torch, precision)
    return {n: t.to(dtype) if t.dtype == torch.float32 else t for n, t in tensors.items()}


def widened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Halves as float32, in which everything is computed; others as they are."""
    return {n: t.float() if t.dtype in HALF else t for n, t in tensors.items()}

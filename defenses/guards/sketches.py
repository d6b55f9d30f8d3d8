"""Sketches: a few numbers of a tensor from which one tells later how far it moved.

A count sketch: every number gets a random sign, and 64 sums of them are kept. The squared norm of
the difference of two sketches is, in the mean, that of the tensors' difference; its standard
deviation is a sixth of it. The signs are no secret: they save memory, they hide nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SUMS = 64
LENGTH = SUMS * 1021  # of the signs, which then begin again elsewhere; 1021 is prime


def norms_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """The norm of each tensor, in order."""
    return torch.stack([tensor.detach().float().norm().cpu() for tensor in tensors.values()])


def sketch_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """The sketch (tensors, 64) of tensors, in order."""
    signs = _signs()
    return torch.stack([_sketch(tensor, signs) for tensor in tensors.values()])


def moved(tensors: Mapping[str, Tensor], sketch: Tensor) -> Tensor:
    """About how far each tensor is from the one that was sketched."""
    return (sketch_of(tensors) - sketch).norm(dim=1)


def _sketch(tensor: Tensor, signs: Tensor) -> Tensor:
    flat = tensor.detach().flatten().float().cpu()
    total = torch.zeros(SUMS)
    for at, part in enumerate(flat.split(LENGTH)):
        # shifted each time, so that what repeats in a tensor does not repeat in its signs
        begin = (at * 7919) % LENGTH
        signed = part * signs[begin : begin + len(part)]
        if rest := -len(signed) % SUMS:
            signed = torch.nn.functional.pad(signed, (0, rest))
        total += signed.view(-1, SUMS).sum(dim=0)
    return total


def _signs() -> Tensor:
    coin = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (2 * LENGTH,), generator=coin).float() * 2 - 1

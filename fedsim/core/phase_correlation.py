"""Phase correlation: the shift between two pictures, from their Fourier transforms in closed form;
and cross-correlation, which says how much of each other two pictures are at their best shift.

Apart from the metrics, because attacks register their seeds by it too, in workers without scoring.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cyclic_shifts(
    onto: Tensor, moved: Tensor, size: tuple[int, int], floor: float | None = None
) -> Tensor:
    """The whole-pixel cyclic shifts (B, 2), down and across, that bring ``moved`` onto ``onto``.

    Both are half spectra of grey pictures (B, H, W // 2 + 1), ``size`` is the pictures' H and W.
    Frequencies weaker than ``floor`` (the least normal number, if left out) hardly count.
    """
    cross = onto * moved.conj()
    least = torch.finfo(cross.real.dtype).tiny if floor is None else floor
    peaks = _at_every_shift(cross / cross.abs().clamp(min=least), size)
    best, width = peaks.flatten(1).argmax(1), size[1]
    return torch.stack([best // width, best % width], dim=1)


def largest_overlaps(onto: Tensor, moved: Tensor, size: tuple[int, int]) -> Tensor:
    """The largest inner product (B,) of one picture with each of ``moved`` at any cyclic shift;
    given half spectra (3, H, W // 2 + 1) and (B, 3, H, W // 2 + 1)."""
    return _at_every_shift((onto * moved.conj()).sum(1), size).flatten(1).amax(1)


def _at_every_shift(cross: Tensor, size: tuple[int, int]) -> Tensor:
    return torch.fft.irfft2(cross, s=size)

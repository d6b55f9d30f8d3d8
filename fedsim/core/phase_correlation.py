"""Phase correlation: the shift between two pictures, from their Fourier transforms in closed form.

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
    peaks = torch.fft.irfft2(cross / cross.abs().clamp(min=least), s=size)
    best, width = peaks.flatten(1).argmax(1), size[1]
    return torch.stack([best // width, best % width], dim=1)

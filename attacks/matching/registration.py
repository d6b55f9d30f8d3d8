"""Registration: translations between images, by phase correlation.

GradInversion and GradViT register their seeds with RANSAC-Flow, whose weights cannot be obtained;
what the papers describe at this point is mostly a shift, which the Fourier transform finds in
closed form. A move is kept only where it brings the image closer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.core.phase_correlation import cyclic_shifts

FLOOR = 1e-12  # a frequency in which the two have less in common is rounding


def shift_between(image: Tensor, onto: Tensor) -> tuple[int, int]:
    """The whole-pixel shift (down, across) that best moves ``image`` (C, H, W) onto ``onto``."""
    height, width = image.shape[-2:]
    moved, fixed = (torch.fft.rfft2(picture.mean(0))[None] for picture in (image, onto))
    row, column = cyclic_shifts(fixed, moved, (height, width), floor=FLOOR)[0].tolist()
    return (
        row - height if row > height // 2 else row,
        column - width if column > width // 2 else column,
    )


def align(image: Tensor, onto: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """``image`` moved onto ``onto``, and the move; unmoved where that is closer."""
    shift = shift_between(image, onto)
    if shift == (0, 0):
        return image, shift
    moved = torch.roll(image, shift, dims=(-2, -1))
    if float((moved - onto).square().mean()) < float((image - onto).square().mean()):
        return moved, shift
    return image, (0, 0)

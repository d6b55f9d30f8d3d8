"""The 8-bit grid: pictures are stored in multiples of 1/255, which a solve can come close to."""

from __future__ import annotations

from torch import Tensor

SNAP_BELOW = 0.05  # of a grid step; numbers at random lie 0.25 away on average


def distance_to_8_bit(image: Tensor) -> float:
    """Mean distance of the pixels inside (0, 1) to the nearest multiple of 1/255, in steps."""
    inside = image[(image > 0) & (image < 1)] * 255
    return float((inside - inside.round()).abs().mean()) if len(inside) else 1.0


def on_8_bit_grid(image: Tensor) -> Tensor:
    """The picture of multiples of 1/255 that is nearest."""
    return (image * 255).round().float() / 255

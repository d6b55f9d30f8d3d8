"""Sinusoidal position embedding: fixed waves in place of learned positions, never uploaded.

A fixed embedding alone does not defend (see the attack `row_space`); this one has a rank far below
the number of patches, which is what that attack needs it not to have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.core.anatomy import tensor_of, vit_parts
from fedsim.core.defense import Defense
from fedsim.core.errors import ModelError


@dataclass(frozen=True)
class SinusoidalPE(Defense):
    """Waves of the patch's row in one half of the channels, of its column in the other, with
    wavelengths up to ``period``, at the size ``scale`` (that of a learned one is about 0.02)."""

    period: Annotated[float, Field(gt=1)] = 10_000.0
    scale: Annotated[float, Field(gt=0)] = 1.0

    def prepare_model(self, model: nn.Module) -> nn.Module:
        parts = vit_parts(model)
        if parts.position is None:
            raise ModelError(
                "sinusoidal_pe needs a model with a position embedding; this has none."
            )
        position = tensor_of(model, parts.position)
        width = parts.rows_of(position).shape[1]
        waves = self.scale * sinusoids(parts.grid, width, self.period)
        with torch.no_grad():
            position.zero_()
            parts.rows_of(position)[:] = waves
        position.requires_grad_(False)
        return model


def sinusoids(grid: tuple[int, int], width: int, period: float) -> Tensor:
    """(rows * columns, width): sines and cosines of the row, then of the column."""
    if width % 4:
        raise ModelError(f"sinusoidal_pe needs a width that divides by 4, not {width}.")
    rates = period ** -(torch.arange(width // 4) / (width // 4))
    rows, columns = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    angles = [axis.flatten()[:, None] * rates[None] for axis in (rows, columns)]
    return torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], dim=1)

"""Comparison: reconstructions beside the truth, as metrics see them.

Several metrics start from the same thing (spectra, the features of a network), and the true
pictures of one victim are compared with what every attack made of them. So what was computed from a
batch is kept with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from fedsim.core.metrics.pixels import Spectra, mse, spectrum

T = TypeVar("T")


class Batch:
    """Pictures (B, 3, H, W) in [0, 1], and what was computed from them."""

    def __init__(self, images: Tensor):
        self.images = images
        self._computed: dict[Callable[[Tensor], Any], Any] = {}

    def once(self, function: Callable[[Tensor], T]) -> T:
        """``function`` of the pictures, computed when first asked for."""
        if function not in self._computed:
            self._computed[function] = function(self.images)
        result: T = self._computed[function]
        return result

    @property
    def side(self) -> int:
        """Pixels of the shorter side."""
        return min(self.images.shape[-2:])


class Comparison:
    """The true pictures of a victim, and for each of them what one attack made of it."""

    def __init__(self, truth: Batch, guess: Batch):
        self.truth, self.guess = truth, guess

    @functools.cached_property
    def error(self) -> Tensor:
        """The mean squared error of each pair."""
        return mse(self.truth.images, self.guess.images)

    @functools.cached_property
    def spectra(self) -> Spectra:
        height, width = self.truth.images.shape[-2:]
        return Spectra(self.truth.once(spectrum), self.guess.once(spectrum), (height, width))

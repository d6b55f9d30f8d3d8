"""The table of metrics: all that the rest of the code knows of them.

Scores, statistics, verdicts, benchmarks, reports, TensorBoard and the viewer read it, so that a
metric is added by one entry. What a verdict says by definition (30 dB, 0.05 SSIM) stands with the
verdict's rules instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedsim.core.metrics.comparison import Comparison
from fedsim.core.metrics.perceptual import lpips_between, lpips_features, lpips_unavailable
from fedsim.core.metrics.pixels import decibel, psnr_registered, ssim

# Files (scores, summary, a bench's tables) hold all metrics. `headlines` is wherever there is room
# for few: under pictures, attack against attack, round by round, the cells of a benchmark.
Place = Literal["report", "viewer", "tensorboard", "headlines"]

NOWHERE: frozenset[Place] = frozenset()
TABLES: frozenset[Place] = frozenset({"report", "viewer", "tensorboard"})
EVERYWHERE: frozenset[Place] = TABLES | {"headlines"}


@dataclass(frozen=True)
class Metric:
    """One number for each pair of a true picture and its reconstruction."""

    name: str  # of its column in the scores
    title: str  # as reports call it
    measure: Callable[[Comparison], Tensor]  # (B,)
    leaks: Literal["higher", "lower"]  # which values are closer to the client's picture
    unit: str = ""
    digits: int = 3  # in tables
    headline_digits: int = 2
    shown: frozenset[Place] = TABLES
    unavailable: Callable[[int], str | None] | None = None  # why, for pictures of that side

    def __post_init__(self) -> None:
        if self.unavailable is not None and "headlines" in self.shown:
            raise ValueError(
                f"'{self.name}' may be empty and so makes no headlines: leave them out of shown."
            )

    @property
    def higher_leaks(self) -> bool:
        return self.leaks == "higher"

    @property
    def heading(self) -> str:
        """The title with the unit, over a column or beside an axis."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def missing(self, side: int) -> str | None:
        """Why it cannot be computed for pictures of ``side`` pixels, or None."""
        return self.unavailable(side) if self.unavailable is not None else None


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("mse", "MSE", lambda pair: pair.error, "lower", shown=NOWHERE),
        Metric(
            "psnr",
            "PSNR",
            lambda pair: decibel(pair.error),
            "higher",
            unit="dB",
            digits=1,
            headline_digits=1,
            shown=EVERYWHERE,
        ),
        Metric(
            "psnr_registered",
            "PSNR, registered",
            lambda pair: psnr_registered(pair.truth.images, pair.guess.images, pair.spectra),
            "higher",
            unit="dB",
            digits=1,
            headline_digits=1,
            shown=NOWHERE,
        ),
        Metric(
            "ssim",
            "SSIM",
            lambda pair: ssim(pair.truth.images, pair.guess.images),
            "higher",
            shown=EVERYWHERE,
        ),
        Metric(
            "lpips",
            "LPIPS",
            lambda pair: lpips_between(
                pair.truth.once(lpips_features), pair.guess.once(lpips_features)
            ),
            "lower",
            unavailable=lambda side: lpips_unavailable(),
        ),
        Metric(
            "fft2d",
            "FFT2D",
            lambda pair: pair.spectra.fft2d(),
            "lower",
            shown=frozenset({"report"}),
        ),
    )
}


def shown_in(place: Place) -> list[Metric]:
    """The metrics that ``place`` shows; those that may be empty last."""
    chosen = [metric for metric in METRICS.values() if place in metric.shown]
    return sorted(chosen, key=lambda metric: metric.unavailable is not None)

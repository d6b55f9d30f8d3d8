"""Metrics: how much of a picture a reconstruction gives away. Images are (B, 3, H, W) in [0, 1].

`METRICS` is the table that everything else reads; a metric is added by an entry in it.
"""

from __future__ import annotations

from fedsim.core.metrics.comparison import Batch, Comparison
from fedsim.core.metrics.perceptual import (
    SMALLEST,
    LpipsFeatures,
    lpips,
    lpips_between,
    lpips_features,
    lpips_unavailable,
)
from fedsim.core.metrics.pixels import (
    CEILING_DB,
    Spectra,
    decibel,
    fft2d,
    match_order,
    match_shifted,
    mse,
    psnr,
    psnr_registered,
    ssim,
)
from fedsim.core.metrics.table import METRICS, Metric, Place, shown_in

__all__ = [
    "CEILING_DB",
    "METRICS",
    "SMALLEST",
    "Batch",
    "Comparison",
    "LpipsFeatures",
    "Metric",
    "Place",
    "Spectra",
    "decibel",
    "fft2d",
    "lpips",
    "lpips_between",
    "lpips_features",
    "lpips_unavailable",
    "match_order",
    "match_shifted",
    "mse",
    "psnr",
    "psnr_registered",
    "shown_in",
    "ssim",
]

"""Metrics: how much of a picture a reconstruction gives away. Images are (B, 3, H, W) in [0, 1]."""

from __future__ import annotations

from fedsim.core.metrics.perceptual import (
    SMALLEST,
    LpipsFeatures,
    lpips,
    lpips_between,
    lpips_features,
    lpips_unavailable,
)
from fedsim.core.metrics.pixels import (
    Spectra,
    decibel,
    fft2d,
    match_order,
    mse,
    psnr,
    psnr_registered,
    ssim,
)

__all__ = [
    "SMALLEST",
    "LpipsFeatures",
    "Spectra",
    "decibel",
    "fft2d",
    "lpips",
    "lpips_between",
    "lpips_features",
    "lpips_unavailable",
    "match_order",
    "mse",
    "psnr",
    "psnr_registered",
    "ssim",
]

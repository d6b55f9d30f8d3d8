"""Pixel metrics, and those of spectra. Images are (B, 3, H, W) in [0, 1]; every function works on a
whole batch, because a run may score thousands of pictures of 224 x 224."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F

from fedsim.core.phase_correlation import cyclic_shifts, largest_overlaps

MSE_FLOOR = 1e-16  # an exact float32 copy reads 160 dB, not infinity
CEILING_DB = -10 * math.log10(MSE_FLOOR)
SIGMA, RADIUS = 1.5, 5  # of SSIM's Gaussian window
MOST_COMPARED = 2**26  # pixels, over all pairs, of pictures compared at every shift
STABLE = (0.01**2, 0.03**2)  # SSIM's constants for a peak of 1


def match_order(truth: Tensor, guess: Tensor) -> list[int]:
    """For each true image the row of ``guess`` that is its partner (least total MSE)."""
    # Row by row: all differences of a large batch at once would fill the memory.
    cost = torch.stack([((picture - guess) ** 2).flatten(1).mean(1) for picture in truth])
    return _partners(cost)


def match_shifted(truth: Tensor, guess: Tensor) -> list[int]:
    """The same where each pair is compared after the cyclic shift that fits it best, found by its
    cross-correlation. Very many large pictures are compared at half their size, or less."""
    while len(truth) * len(guess) * truth[0, 0].numel() > MOST_COMPARED and truth.shape[-1] > 8:
        truth, guess = F.avg_pool2d(truth, 2), F.avg_pool2d(guess, 2)
    first, second = spectrum(truth), spectrum(guess)
    height, width = truth.shape[-2:]
    square, other = (x.float().square().sum((1, 2, 3)) for x in (truth, guess))
    rows = []
    for own, power in zip(first, square, strict=True):  # row by row, as above
        rows.append(power + other - 2 * largest_overlaps(own, second, (height, width)))
    return _partners(torch.stack(rows))


def _partners(cost: Tensor) -> list[int]:
    """For each row the column that is its partner at the least total cost, or -1."""
    rows, columns = linear_sum_assignment(cost.double().numpy())
    partner = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    return [partner.get(row, -1) for row in range(len(cost))]


def mse(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() - b.double()).flatten(1).square().mean(1)


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """-10 log10(MSE) with peak 1; at most 160 dB."""
    return decibel(mse(a, b))


def decibel(error: Tensor) -> Tensor:
    """PSNR from mean squared errors."""
    return -10 * torch.log10(error.clamp(min=MSE_FLOOR))


def spectrum(images: Tensor) -> Tensor:
    """The half spectrum of each channel, (B, 3, H, W // 2 + 1)."""
    return torch.fft.rfft2(images.float())


@dataclass(frozen=True)
class Spectra:
    """The half spectra of two batches, computed once for the metrics that need them."""

    first: Tensor
    second: Tensor
    size: tuple[int, int]  # of the pictures: H, W

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> Spectra:
        height, width = a.shape[-2:]
        return cls(spectrum(a), spectrum(b), (height, width))

    def fft2d(self) -> Tensor:
        """Cosine distance of the magnitudes of the 2-D spectra: 0 for equal, at most 1."""
        weights = _hermitian(self.size[1])
        first, second = self.first.abs(), self.second.abs()
        product, one, two = (
            (weights * x * y).double().sum((1, 2, 3))
            for x, y in ((first, second), (first, first), (second, second))
        )
        size = (one.sqrt() * two.sqrt()).clamp(min=1e-30)
        return (1 - product / size).clamp(min=0)

    def shifts(self) -> Tensor:
        """The shift (B, 2) of each second picture, by phase correlation of the grey pictures."""
        return cyclic_shifts(self.first.mean(1), self.second.mean(1), self.size)


def fft2d(a: Tensor, b: Tensor) -> Tensor:
    """Cosine distance of the magnitudes of the 2-D spectra: 0 for equal, at most 1.

    On magnitudes, because on complex spectra it would be the cosine of the pixels.
    """
    return Spectra.of(a, b).fft2d()


def _hermitian(width: int) -> Tensor:
    """How often each column of a real picture's half spectrum stands in the whole one."""
    weights = torch.full((width // 2 + 1,), 2.0)
    weights[0] = 1.0
    if width % 2 == 0:
        weights[-1] = 1.0
    return weights


def psnr_registered(a: Tensor, b: Tensor, spectra: Spectra | None = None) -> Tensor:
    """PSNR after the whole-pixel cyclic shift of ``b`` that fits ``a`` best.

    The shift comes from phase correlation; where it does not help, none is made.
    """
    shifts = (spectra or Spectra.of(a, b)).shifts()
    error = mse(a, b)
    for row in torch.nonzero(shifts.any(1)).flatten().tolist():
        down, right = shifts[row].tolist()
        moved = b[row].roll((down, right), dims=(1, 2))
        error[row] = torch.minimum(error[row], mse(a[row][None], moved[None])[0])
    return decibel(error)


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity (Wang et al. 2004), Gaussian window of sigma 1.5, mean over channels;
    the same numbers as scikit-image's, on whole batches."""
    taps = _window(min(a.shape[-2:]))
    a, b = a.float(), b.float()
    # The mean of each channel is taken off first: variances of bright flat pictures would drown in
    # float32 otherwise.
    level = (a.mean((2, 3), keepdim=True) + b.mean((2, 3), keepdim=True)) / 2
    x, y = a - level, b - level
    mean_x, mean_y = _blurred(x, taps), _blurred(y, taps)
    sample = len(taps) ** 2 / (len(taps) ** 2 - 1)
    both = sample * (_blurred(x * x + y * y, taps) - mean_x.square() - mean_y.square())
    joint = sample * (_blurred(x * y, taps) - mean_x * mean_y)
    mean_x, mean_y = mean_x + level, mean_y + level
    first, second = STABLE
    above = (2 * mean_x * mean_y + first) * (2 * joint + second)
    below = (mean_x.square() + mean_y.square() + first) * (both + second)
    return (above / below).double().mean((1, 2, 3))


@functools.cache
def _window(side: int) -> tuple[float, ...]:
    """The Gaussian's weights; a flat window where the picture is smaller than the Gaussian."""
    if side < 2 * RADIUS + 1:
        width = side - (side + 1) % 2
        return (1 / width,) * width
    places = torch.arange(-RADIUS, RADIUS + 1, dtype=torch.float64)
    weights = torch.exp(-places.square() / (2 * SIGMA**2))
    return tuple((weights / weights.sum()).tolist())


def _blurred(images: Tensor, taps: tuple[float, ...]) -> Tensor:
    """Filtered along both axes, where the window fits. Sums of shifted copies: on a CPU many times
    faster than a convolution with one channel."""
    for axis in (2, 3):
        count = images.shape[axis] - len(taps) + 1
        total = images.narrow(axis, 0, count) * taps[0]
        for at, weight in enumerate(taps[1:], start=1):
            total.add_(images.narrow(axis, at, count), alpha=weight)
        images = total
    return images

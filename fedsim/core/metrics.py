"""Metrics: how much of a picture a reconstruction gives away. Images are (B, 3, H, W) in [0, 1]."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from skimage.metrics import structural_similarity
from skimage.registration import phase_cross_correlation
from torch import Tensor

MSE_FLOOR = 1e-16  # an exact float32 copy reads 160 dB, not infinity


def match_order(truth: Tensor, guess: Tensor) -> list[int]:
    """For each true image the row of ``guess`` that is its partner (least total MSE)."""
    cost = ((truth[:, None] - guess[None]) ** 2).flatten(2).mean(2)
    rows, columns = linear_sum_assignment(cost.double().numpy())
    partner = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    return [partner.get(row, -1) for row in range(len(truth))]


def mse(a: Tensor, b: Tensor) -> Tensor:
    return ((a.double() - b.double()) ** 2).flatten(1).mean(1)


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """-10 log10(MSE) with peak 1; at most 160 dB."""
    return -10 * torch.log10(mse(a, b).clamp(min=MSE_FLOOR))


def psnr_registered(a: Tensor, b: Tensor) -> Tensor:
    """PSNR after the whole-pixel cyclic shift of ``b`` that fits ``a`` best.

    The shift comes from phase correlation; where it does not help, there is none.
    """
    values = []
    for one, other in zip(a, b, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a flat picture has no phase
            shift, _, _ = phase_cross_correlation(one.mean(0).numpy(), other.mean(0).numpy())
        moved = other.roll([int(s) for s in np.nan_to_num(shift)], dims=(1, 2))
        values.append(torch.maximum(psnr(one[None], moved[None]), psnr(one[None], other[None])))
    return torch.cat(values)


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity (Wang et al. 2004), Gaussian window of sigma 1.5; scikit-image's."""
    options = {"data_range": 1.0, "channel_axis": 0, "gaussian_weights": True}
    side = min(a.shape[-2:])
    if side < 11:  # the Gaussian window would not fit
        options |= {"gaussian_weights": False, "win_size": side - (side + 1) % 2}
    pairs = zip(a.double().numpy(), b.double().numpy(), strict=True)
    return torch.tensor([float(structural_similarity(x, y, **options)) for x, y in pairs])


def fft2d(a: Tensor, b: Tensor) -> Tensor:
    """Cosine distance of the magnitudes of the 2-D spectra: 0 for equal, at most 1.

    On magnitudes, because on complex spectra it would be the cosine of the pixels.
    """
    first = torch.fft.fft2(a.double()).abs().flatten(1)
    second = torch.fft.fft2(b.double()).abs().flatten(1)
    return (1 - torch.nn.functional.cosine_similarity(first, second)).clamp(min=0)


def lpips_unavailable() -> str | None:
    """Why LPIPS cannot be computed here, or None."""
    name = "alexnet-owt-7be5be79.pth"
    if (Path(torch.hub.get_dir()) / "checkpoints" / name).is_file():
        return None
    return (
        f"the AlexNet weights LPIPS needs ({name}) are not in torch's hub cache; "
        f"`torchvision.models.alexnet(weights='DEFAULT')` fetches them where there is a network"
    )


@functools.cache
def _lpips_network() -> Callable[[Tensor, Tensor], Tensor]:
    import lpips as package

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = package.LPIPS(net="alex", verbose=False)
    network.requires_grad_(False)
    return network.eval()


def lpips(a: Tensor, b: Tensor) -> Tensor | None:
    """LPIPS (Zhang et al. 2018) with AlexNet; None where `lpips_unavailable` says why."""
    if lpips_unavailable():
        return None
    with torch.no_grad():
        return _lpips_network()(2 * a.float() - 1, 2 * b.float() - 1).flatten()

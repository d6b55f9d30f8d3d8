"""Metrics: each equals its formula on a case small enough to check by hand."""

from __future__ import annotations

import math

import pytest
import torch
from skimage.metrics import structural_similarity

from fedsim.core import metrics
from fedsim.core.metrics import pixels
from tests.core.metrics.conftest import A
from tests.staging import photos


def test_psnr_is_minus_ten_log_mse() -> None:
    other = (A + 0.1).clamp(max=2)
    assert metrics.mse(A, other).tolist() == pytest.approx([0.01] * 3, rel=1e-4)
    assert metrics.psnr(A, other).tolist() == pytest.approx([20.0] * 3, rel=1e-4)


def test_an_exact_copy_is_160_db_not_infinite() -> None:
    assert metrics.psnr(A, A).tolist() == [160.0] * 3


def test_batch_order_is_matched() -> None:
    order = [2, 0, 1]
    assert metrics.match_order(A, A[order]) == [1, 2, 0]
    assert torch.equal(A[order][metrics.match_order(A, A[order])], A)


def test_an_image_nobody_claims_has_no_partner() -> None:
    assert sorted(metrics.match_order(A, A[:2])) == [-1, 0, 1]


def test_a_shifted_copy_is_registered() -> None:
    shifted = A.roll((3, -2), dims=(2, 3))
    assert (metrics.psnr(A, shifted) < 20).all()
    assert metrics.psnr_registered(A, shifted).tolist() == [160.0] * 3
    assert (metrics.psnr_registered(A, 1 - A) >= metrics.psnr(A, 1 - A)).all()


@pytest.mark.parametrize("most", [2**26, 2**8])  # as they are, and at half their size
def test_shifted_copies_are_matched_each_where_it_fits(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pixels, "MOST_COMPARED", most)
    pictures, _ = photos(32, range(0, 160, 20))
    order = [3, 1, 7, 0, 5, 2, 6, 4]
    moved = pictures[order].roll((15, -9), dims=(2, 3))
    found = metrics.match_shifted(pictures, moved)
    assert [order[row] for row in found] == list(range(8))
    assert metrics.match_shifted(pictures, moved[:2]).count(-1) == 6


def test_ssim_is_one_for_equal_pictures_and_less_for_others() -> None:
    assert metrics.ssim(A, A).tolist() == pytest.approx([1.0] * 3)
    assert (metrics.ssim(A, A.roll(1, 0)) < 0.5).all()


@pytest.mark.parametrize("side", [11, 16, 33, 64])
def test_ssim_is_that_of_scikit_image(side: int) -> None:
    coin = torch.Generator().manual_seed(side)
    smooth = torch.nn.functional.avg_pool2d(torch.rand(4, 3, 4 * side, 4 * side, generator=coin), 4)
    pairs = [(smooth[:2], smooth[2:]), (0.98 + 0.02 * smooth[:2], 0.98 + 0.02 * smooth[2:])]
    for a, b in pairs:
        theirs = [
            structural_similarity(x, y, data_range=1.0, channel_axis=0, gaussian_weights=True)
            for x, y in zip(a.double().numpy(), b.double().numpy(), strict=True)
        ]
        assert metrics.ssim(a, b).tolist() == pytest.approx(theirs, abs=2e-4)


def test_the_half_spectrum_gives_the_whole_ones_distance() -> None:
    for width in (15, 16):
        a, b = A[..., :width], A.flip(0)[..., :width]
        first, second = (torch.fft.fft2(x.double()).abs().flatten(1) for x in (a, b))
        whole = 1 - torch.nn.functional.cosine_similarity(first, second)
        assert metrics.fft2d(a, b).tolist() == pytest.approx(whole.tolist(), abs=1e-5)


def test_ssim_also_works_on_tiny_pictures() -> None:
    assert metrics.ssim(A[..., :8, :8], A[..., :8, :8]).tolist() == pytest.approx([1.0] * 3)


def test_fft2d_is_the_cosine_distance_of_magnitudes() -> None:
    first, second = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)
    first[0, 0, 0, 0] = 1.0  # |F| = 1 everywhere
    second[:] = 1.0  # |F| = 4 at zero frequency, 0 elsewhere
    expected = 1 - 4 / (math.sqrt(4) * 4)
    assert float(metrics.fft2d(first, second)) == pytest.approx(expected)


def test_fft2d_does_not_see_a_shift() -> None:
    assert float(metrics.fft2d(A, A.roll(5, dims=3)).max()) == pytest.approx(0, abs=1e-6)

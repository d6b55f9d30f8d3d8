"""Calibration: the limit of D-SNR falls with the batch, and is defined for every size."""

from __future__ import annotations

import pytest

from fedsim.defenses.guards.calibration import D_SNR, d_snr_limit


def test_the_limit_is_the_measured_one_where_there_is_one() -> None:
    assert [d_snr_limit(size) for size in D_SNR] == list(D_SNR.values())


def test_the_limit_falls_with_the_batch_and_stays_beyond_the_largest() -> None:
    limits = [d_snr_limit(size) for size in range(1, 200)]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] == D_SNR[2]
    assert limits[-1] == D_SNR[64]
    assert d_snr_limit(32) == pytest.approx((D_SNR[16] * D_SNR[64]) ** 0.5)

"""Accounting: what noise has cost, against closed forms."""

from __future__ import annotations

import math

import pytest

from fedsim.defenses.accounting import spent


def test_one_gaussian_sum_costs_what_the_divergence_of_gaussians_says() -> None:
    """Renyi divergence of order a is a / (2 noise^2); the best order gives epsilon."""
    noise, delta = 2.0, 1e-5
    by_hand = min(
        a / (2 * noise**2) + math.log1p(-1 / a) - (math.log(delta) + math.log(a)) / (a - 1)
        for a in [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    )
    assert spent(noise, 1.0, 1, delta) == pytest.approx(by_hand, rel=1e-3)


def test_more_steps_cost_more_and_rarer_ones_less() -> None:
    once = spent(1.0, 0.1, 1, 1e-5)
    assert once < spent(1.0, 0.1, 100, 1e-5) < 100 * once
    assert spent(1.0, 0.01, 100, 1e-5) < spent(1.0, 0.1, 100, 1e-5)


def test_without_noise_there_is_no_guarantee() -> None:
    assert spent(0.0, 0.1, 1, 1e-5) == math.inf

"""Accounting: the privacy that noise has spent, by opacus' accountant on Renyi divergences."""

from __future__ import annotations

import warnings


def spent(noise: float, rate: float, steps: int, delta: float) -> float:
    """Epsilon after ``steps`` noisy sums, each summand being in a share ``rate`` of them. The noise
    is Gaussian, with ``noise`` times a summand's largest norm as its deviation."""
    from opacus.accountants import RDPAccountant

    if noise == 0:
        return float("inf")
    accountant = RDPAccountant()
    accountant.history = [(noise, rate, steps)]
    with warnings.catch_warnings():  # of loose bounds, at budgets that mean nothing
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta))

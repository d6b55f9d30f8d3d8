"""How much privacy noise has cost: opacus' accountant on Renyi divergences."""

from __future__ import annotations

import warnings


def spent(noise: float, rate: float, steps: int, delta: float) -> float:
    """Epsilon after ``steps`` sums with Gaussian noise, as a multiple ``noise`` of one summand's
    largest norm, where each summand is in a share ``rate`` of the sums."""
    from opacus.accountants import RDPAccountant

    if noise == 0:
        return float("inf")
    accountant = RDPAccountant()
    accountant.history = [(noise, rate, steps)]
    with warnings.catch_warnings():  # at budgets that mean nothing, a looser bound is no news
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta))

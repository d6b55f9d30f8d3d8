"""Solvers: the ridge is as large as the noise asks for."""

from __future__ import annotations

import torch

from fedsim.attacks.closed.solvers import ridge_solve


def test_the_ridge_is_small_for_clean_and_large_for_noisy_equations() -> None:
    coin = torch.Generator().manual_seed(0)
    a = (
        torch.randn(60, 30, generator=coin).double()
        @ torch.diag(torch.logspace(0, -5, 30)).double()
    )
    x = torch.randn(30, 8, generator=coin).double()
    noise = torch.randn(60, 8, generator=coin).double()
    clean, noisy = ridge_solve(a, a @ x), ridge_solve(a, a @ x + 1e-2 * noise)
    assert clean.ridge < 1e-12 < noisy.ridge
    assert torch.linalg.norm(clean.x - x) < 1e-6 * torch.linalg.norm(x)
    plain = ridge_solve(a, a @ x + 1e-2 * noise, ridge=0.0)
    assert torch.linalg.norm(noisy.x - x) < 0.1 * torch.linalg.norm(plain.x - x)

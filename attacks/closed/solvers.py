"""Solvers: linear least squares with a ridge that is chosen without the truth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RidgeSolution:
    """X of A X = Y in float64, with what the choice of the ridge rests on."""

    x: Tensor  # (n, k)
    ridge: float  # relative to the largest singular value squared
    rank: int  # of A, at the precision of the data
    residual: float  # |A X - Y| / |Y|


def ridge_solve(
    a: Tensor, y: Tensor, *, prior: float = 0.0, ridge: float | None = None, eps: float = 1e-7
) -> RidgeSolution:
    """Least squares of ``a`` (m, n) X = ``y`` (m, k), shrunk towards ``prior``.

    ``ridge`` None chooses it by generalised cross-validation (Golub, Heath, Wahba 1979) over a
    logarithmic grid: the score asks how well each equation is predicted by the others, so it needs
    neither the truth nor a noise level. ``eps`` is the relative precision of the data.
    """
    a, y = a.double(), y.double()
    target = y - a @ torch.full((a.shape[1], y.shape[1]), prior, dtype=y.dtype, device=y.device)
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    scale = float(s[0]) if len(s) and float(s[0]) > 0 else 1.0
    rank = int((s > scale * eps * max(a.shape) ** 0.5).sum())
    projected = u.T @ target  # (r, k)
    outside = (target - u @ projected).square().sum()  # not as a difference of large sums
    chosen = _gcv(s / scale, projected, outside, a.shape[0], eps) if ridge is None else ridge
    filtered = s / (s.square() + chosen * scale**2).clamp(min=torch.finfo(s.dtype).tiny)
    x = vh.T @ (filtered[:, None] * projected) + prior
    residual = float(torch.linalg.norm(a @ x - y) / torch.linalg.norm(y).clamp(min=1e-300))
    return RidgeSolution(x, chosen, rank, residual)


def _gcv(s: Tensor, projected: Tensor, outside: Tensor, rows: int, eps: float) -> float:
    """The ridge with the least generalised cross-validation score."""
    floor = max(eps**2 * 1e-4, 1e-24)
    candidates = torch.logspace(
        torch.log10(torch.tensor(floor)).item(), 0, 97, dtype=s.dtype, device=s.device
    )
    energy = projected.square().sum(1)  # (r,)
    factors = s.square() / (s.square() + candidates[:, None])  # (grid, r)
    misfit = ((1 - factors).square() * energy).sum(1) + outside
    freedom = rows - factors.sum(1)
    score = misfit / freedom.clamp(min=1e-9).square()
    return float(candidates[int(score.argmin())])

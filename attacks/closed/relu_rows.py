"""ReLU rows: what the gradient of a linear layer with a ReLU behind it says of the batch it read.

With the pictures x_j as rows of Y, each with a 1 for the bias, the gradient is [dW | db] = D Y, and
D_ij is zero where unit i is off for picture j, [W | b] y_j <= 0. So a column of D is known by its
zeros, and it must be zero on one side of a plane (SPEAR, Dimitrov et al. 2024, Sec. 3 and 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsim.attacks.closed.sparse import Column, ColumnSpace

_BELIEVED = 0.995  # of the units, on the right side of the plane
_SPARED = 4  # units that may be taken for off and are not, or the other way round
_NEWTON = 25
_HOPELESS, _SOON = 0.9, 6  # so few on the right side after so many steps
_POLISH = 3


@dataclass(frozen=True)
class Layer:
    """The gradient [dW | db] and what the layer's own numbers [W | b] make of its row space."""

    space: ColumnSpace
    weight: Tensor  # [W | b], (m, n + 1)

    @cached_property
    def sides(self) -> Tensor:
        """Each unit's output for the rows of M's basis, (m, r)."""
        return self.weight @ self.space.right.T

    def judge(self, q: Tensor) -> Column | None:
        """A direction as a column of D, the right way round, if the units where it is not zero lie
        on one side of a plane, as those that are on for one picture do."""
        on = ~self.space.zeros(q[None])[0]
        normal, share = plane(self.sides * self.space.sizes, on)
        believed = _BELIEVED - _SPARED / len(on) - self.space.blurred(q)
        if self.space.rank > 1 and share < believed:  # one picture is told by the rank
            return None
        return Column(q if float(normal @ q) >= 0 else -q, normal / normal.norm())

    def pictures(self, found: list[Tensor]) -> Tensor:
        """Rows (x_j, 1) of the pictures whose columns are L q, (c, n + 1). Where all are known, Y
        is the inverse of Q; else what is open is set by the sides of the units."""
        known = torch.stack(found, 1)  # Q, (r, c)
        inverse = torch.linalg.pinv(known)
        basis = self.space.sizes[:, None] * self.space.right
        if known.shape[1] < len(known):
            rest = torch.linalg.qr(known, mode="complete").Q[:, known.shape[1] :].T
            inverse = torch.stack(
                [self._completed(row, rest, q) for row, q in zip(inverse, found, strict=True)]
            )
        rows = inverse @ basis
        return rows / _away_from_zero(rows[:, -1:])

    def _completed(self, row: Tensor, rest: Tensor, q: Tensor) -> Tensor:
        """One row of the inverse of Q, known but for a combination of the rows of ``rest``."""
        on = ~self.space.zeros(q[None])[0]
        outputs = torch.cat([row[None], rest]) * self.space.sizes @ self.sides.T
        normal, _ = plane(outputs.T, on)
        return row + (normal[1:] / _away_from_zero(normal[:1])) @ rest

    def polished(self, found: list[Tensor]) -> list[Tensor]:
        """The directions of all columns, by all units that are off for the pictures they give."""
        if len(found) < self.space.rank:
            return found
        rows = self.space.rows / self.space.noise[:, None]
        before = None
        for _ in range(_POLISH):
            off = self.pictures(found) @ self.weight.T <= 0
            if before is not None and torch.equal(off, before):
                break
            before, better = off, []
            for q, zero in zip(found, off, strict=True):
                if int(zero.sum()) < self.space.rank:
                    return found
                least = torch.linalg.svd(rows[zero], full_matrices=False).Vh[-1]
                least = least * self.space.sizes
                least = least / least.norm()
                better.append(least if float(least @ q) >= 0 else -least)
            found = better
        return found

    def explained(self, pictures: Tensor) -> tuple[Tensor, float]:
        """The D (m, c) that fits best with pictures (c, n + 1) and the zeros they imply, and the
        relative distance of D Y from the gradient."""
        on = (self.weight @ pictures.T > 0).double()
        shown = pictures @ self.space.right.T  # (c, r)
        gram = shown @ shown.T
        both = on[:, :, None] * on[:, None, :]
        system = both * gram + torch.diag_embed(1 - on)
        side = on * (self.space.rows @ shown.T)
        columns = torch.linalg.lstsq(system, side[:, :, None]).solution[:, :, 0]
        misfit = (self.space.rows - columns @ shown).square().sum() + self.space.rest
        size = self.space.sizes.square().sum() + self.space.rest
        return columns, float((misfit / size).sqrt())


def plane(points: Tensor, on: Tensor) -> tuple[Tensor, float]:
    """The plane through zero that has the points (m, k) that are ``on`` on its one side, by
    logistic regression: its normal, and the share of either kind on its side, the mean of both."""
    scale = points.norm(dim=0).clamp(min=1e-300) / len(points) ** 0.5
    points = points / scale
    sign = on.double() * 2 - 1
    normal, best, least = points.T @ sign / len(points), None, -1.0
    for step in range(_NEWTON):
        values = points @ normal
        right = (values > 0) == on
        share = float((_share(right[on]) + _share(right[~on])) / 2)
        if share >= least:
            best, least = normal, share
        if step == _SOON and least < _HOPELESS:
            break
        sure = torch.sigmoid(-sign * values)
        slope = points.T @ (sign * sure)
        weights = (sure * (1 - sure)).clamp(min=1e-9)
        curve = points.T @ (weights[:, None] * points)
        curve += 1e-6 * curve.diagonal().mean() * torch.eye(len(curve), dtype=curve.dtype)
        normal = normal + torch.linalg.solve(curve, slope)
    assert best is not None
    return best / scale, least


def _share(right: Tensor) -> Tensor:
    return right.double().mean() if len(right) else torch.tensor(1.0, dtype=torch.float64)


def _away_from_zero(numbers: Tensor) -> Tensor:
    return torch.where(numbers.abs() < 1e-300, torch.full_like(numbers, 1e-300), numbers)

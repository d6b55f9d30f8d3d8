"""Sparse directions: the columns of D in a product M = D Y, where D has many zeros and Y is wide.

The columns of D are combinations of M's left singular vectors, L q, with zeros where a ReLU was off
(SPEAR, Dimitrov et al. 2024, Sec. 3). Its search draws r - 1 rows of L and takes their null vector:
a column with half zeros is hit once in 2^(r-1) draws. Here draws are made in small subspaces alone.
The whole space is searched by descent: from a random start, sum_i |L_i q|^p is lowered by
reweighted least squares (p = 1/2). What that finds often mixes a few columns with zeros in common,
and shows it: of a mixture of k columns some k - 1 zeros are accidents, rows without which the
others have one rank less. Without these rows the zeros' null space is the span of the k columns,
and there a draw hits once in 2^(k-1). Derived here; SPEAR++ (Bakarsky et al. 2025) goes from
sampling to dictionary learning too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

_POWER = 0.5  # of |L_i q|: below one, so that zeros are worth more than small numbers
_STEPS = 40  # of the descent, over which what counts as small shrinks from half to 5e-6
_SHRINK = 0.75
_TOGETHER = 64  # starts in one batch
_ABOVE_NOISE = 3.0  # singular values that are not noise
_NEAR_ZERO = 10.0  # standard deviations of the noise
_NEVER_ZERO = 0.05  # of a column's root mean square: however large the noise, more is no zero
_ACCIDENT = 0.999  # leverage of a row, beyond which the others do not need it to be explained
_SPARSE = 0.2  # share of zeros that makes the whole space's search look closer
_WIDEST = 8  # spaces in which draws alone may find all
_DEEPEST, _MIXED = 3, 5  # mixtures in mixtures, and columns in one
_PATIENCE = 5  # batches of starts without a new column
_LOOKS = 16  # at different directions, for each dimension of where they lie
_SAME = 1e-7  # 1 - cosine
_APART = 1e-4  # what a direction must have beside those that are known


@dataclass(frozen=True)
class ColumnSpace:
    """M (m, n) as  L diag(sizes) right  of rank r, with what its other singular values say of the
    numbers' precision."""

    left: Tensor  # L, (m, r)
    sizes: Tensor  # (r,)
    right: Tensor  # (r, n)
    noise: Tensor  # (m,), of one number in each row
    floor: float  # the largest singular value that is noise
    rest: float  # the squared size of all that is

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def rows(self) -> Tensor:
        """M in the basis ``right``, (m, r)."""
        return self.left * self.sizes

    @property
    def unexplained(self) -> float:
        """The part of M that is not in the space."""
        return math.sqrt(self.rest / (self.rest + float(self.sizes.square().sum())))

    @classmethod
    def of(cls, matrix: Tensor, most: int) -> ColumnSpace:
        """Of rank ``most``, or fewer where the spectrum ends before; m, n > most."""
        left = _left_vectors(matrix, most)
        shown = left.T @ matrix
        rest = matrix - left @ shown
        floor, sizes = _largest(rest), shown.norm(dim=1)
        kept = sizes > _ABOVE_NOISE * floor
        if not bool(kept.all()):
            left, shown, sizes = left[:, kept], shown[kept], sizes[kept]
            rest = matrix - left @ shown
        noise = rest.norm(dim=1) / math.sqrt(max(1, matrix.shape[1] - len(sizes)))
        noise = torch.maximum(noise, 0.1 * noise.median()).clamp(min=1e-300)
        return cls(left, sizes, shown / sizes[:, None], noise, floor, float(rest.square().sum()))

    def tolerance(self, q: Tensor) -> Tensor:
        """How far from zero the noise may take each entry of L q: (k, r) -> (k, m)."""
        deviation = self.noise * (q / self.sizes).norm(dim=1, keepdim=True)
        usual = q.norm(dim=1, keepdim=True) / math.sqrt(len(self.left))
        return torch.minimum(_NEAR_ZERO * deviation, _NEVER_ZERO * usual)

    def zeros(self, q: Tensor) -> Tensor:
        """Where L q is zero as far as can be told: (k, r) -> (k, m)."""
        return (q @ self.left.T).abs() <= self.tolerance(q)

    def blurred(self, q: Tensor) -> float:
        """About how many of a column's numbers, as a share, pass for zeros and are none."""
        usual = float(q.norm()) / math.sqrt(len(self.left))
        return float(self.tolerance(q[None]).mean()) / usual


@dataclass(frozen=True)
class Column:
    """A column L q of D, with about what the row of its own is in the inverse of Q: of unit length
    both, and zero with the other columns' ``q``."""

    q: Tensor
    row: Tensor


@dataclass
class Search:
    """The search for all columns of D in a space. ``judge`` says which column a direction with many
    zeros is; None: it is none of D's."""

    space: ColumnSpace
    judge: Callable[[Tensor], Column | None]
    coin: torch.Generator
    found: list[Column] = field(default_factory=list)
    starts: int = 0
    _judged: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))  # (n, r)
    _searched: list[Tensor] = field(default_factory=list)
    _in_vain: int = 0

    @property
    def done(self) -> bool:
        return len(self.found) >= self.space.rank

    def run(self, most: int, told: Callable[[int, int], None]) -> list[Column]:
        """The columns found from at most this many starts; ``told``, after each batch of them, how
        many were taken and found."""
        whole = torch.eye(self.space.rank, dtype=torch.float64)
        if self.space.rank == 1:
            self._offer(whole[0])
        elif 1 < self.space.rank <= _WIDEST:  # few enough for draws alone
            self._look_closer(self._draw(whole), whole, 1)
        while not self.done and self.starts < most and self.space.rank:
            count = min(_TOGETHER, most - self.starts)
            self.starts, before = self.starts + count, len(self.found)
            self._look_closer(self._descend(count), whole, 0)
            self._in_vain = 0 if len(self.found) > before else self._in_vain + 1
            if not self._in_vain % _PATIENCE:  # draws may have missed
                self._searched.clear()
            told(self.starts, len(self.found))
        return self.found

    @property
    def _most_mixed(self) -> int:
        """How many columns a mixture may have that is taken apart: the more, the longer nothing
        else was found."""
        return min(_MIXED + self._in_vain // _PATIENCE, _WIDEST)

    def _descend(self, count: int) -> Tensor:
        """Directions (count, r) with many zeros, from random ones."""
        rank, left = self.space.rank, self.space.left
        alive = left.norm(dim=1) > 0
        rows = left[alive] / left[alive].norm(dim=1, keepdim=True)
        squares = (rows[:, :, None] * rows[:, None, :]).flatten(1)
        q = torch.randn(count, rank, generator=self.coin, dtype=torch.float64)
        q[::2] = self._unlike_the_known(q[::2])
        floor = self._relative_noise()[alive]
        small = torch.full((count, 1), 0.5, dtype=torch.float64)
        if self.found:  # the more is known, the closer the start: it must not be forgotten at once
            small[::2] *= 10 ** (-2 * torch.rand(len(q[::2]), 1, generator=self.coin))
        for _ in range(_STEPS):
            values = (q @ rows.T).square()
            usual = values.mean(1, keepdim=True)
            weights = (values + (small**2 + floor**2) * usual).pow(_POWER / 2 - 1)
            gram = (weights @ squares).view(-1, rank, rank)
            solved, _ = torch.linalg.solve_ex(gram, q[:, :, None])
            q = solved[:, :, 0] / solved[:, :, 0].norm(dim=1, keepdim=True).clamp(min=1e-300)
            small *= _SHRINK
        return q[torch.isfinite(q).all(1)]

    def _unlike_the_known(self, q: Tensor) -> Tensor:
        """Directions less what rows of D's inverse say belongs to columns that are known."""
        if not self.found:
            return q
        rows = torch.linalg.qr(torch.stack([column.row for column in self.found]).T).Q
        return q - (q @ rows) @ rows.T

    def _relative_noise(self) -> Tensor:
        """Of each row, the noise over what the row is."""
        rows = self.space.rows.norm(dim=1).clamp(min=1e-300)
        return self.space.noise / rows

    def _draw(self, basis: Tensor) -> Tensor:
        """Directions (count, r) in the span of ``basis`` (r, k), each with k - 1 zeros at random:
        the columns of inverses of k rows."""
        k = basis.shape[1]
        rows = (self.space.left @ basis)[~self._always_zero(basis)]
        if len(rows) < k:
            return basis.new_zeros(0, len(basis))
        count = min(4000, 100 * 2**k)
        drawn = torch.randint(len(rows), (count, k), generator=self.coin)
        inverse, singular = torch.linalg.inv_ex(rows[drawn])
        q = inverse[singular == 0].transpose(1, 2).reshape(-1, k)
        q = q[torch.isfinite(q).all(1)]
        return (q / q.norm(dim=1, keepdim=True)) @ basis.T

    def _always_zero(self, basis: Tensor) -> Tensor:
        """Rows that are zero in all of a subspace."""
        return self.space.zeros(basis.T.contiguous()).all(0)

    def _look_closer(self, directions: Tensor, basis: Tensor, depth: int) -> None:
        """Take what is one column among directions of a subspace, and the mixtures apart."""
        zeros = torch.cat([self.space.zeros(part).sum(1) for part in directions.split(2048)])
        fewest = int(_SPARSE * len(self.space.left))
        if depth:
            fewest = int(self._always_zero(basis).sum()) + basis.shape[1] + 3
        for _ in range(_LOOKS * basis.shape[1]):
            if self.done or not len(zeros) or int(zeros.max()) < fewest:
                break
            q = directions[zeros.argmax()]
            span = q[:, None] if self._met(q) else self._explained(q)
            other = (directions @ torch.cat([q[:, None], span], 1)).square()
            other = torch.maximum(other[:, 0], other[:, 1:].sum(1)) < 1 - _SAME
            directions, zeros = directions[other], zeros[other]
            k = span.shape[1]
            if k == 1:
                self._offer(span[:, 0])
            elif k < basis.shape[1] and depth < _DEEPEST and self._is_promising(span):
                self._searched.append(span)
                self._look_closer(self._draw(span), span, depth + 1)

    def _explained(self, q: Tensor) -> Tensor:
        """The span (r, k) of the columns that a direction mixes: the null space of its zeros but
        for those that are accidents."""
        zero = self.space.left[self.space.zeros(q[None])[0]]
        rank = self.space.rank
        if len(zero) < rank - 1:
            return q.new_zeros(rank, 0)
        basis = torch.linalg.svd(zero, full_matrices=False).U[:, : rank - 1]
        zero = zero[basis.square().sum(1) < _ACCIDENT]
        if not len(zero):
            return q.new_zeros(rank, 0)
        _, sizes, rows = torch.linalg.svd(zero, full_matrices=True)
        noise = 5 * self.space.floor / self.space.sizes.min()
        return rows[int((sizes > max(float(noise), 1e-9)).sum()) :].T

    def _offer(self, q: Tensor) -> None:
        """Keep a direction that is not a combination of those that are known, if it is one."""
        if self.done or self._met(q):
            return
        column = self.judge(q)
        self._judged = torch.cat([self._judged.view(-1, len(q)), q[None]])
        if column is not None and float(_outside(q, self._directions).norm()) > _APART:
            self.found.append(column)

    def _met(self, q: Tensor) -> bool:
        """Whether a direction, or its opposite, was judged before."""
        return bool(((self._judged.view(-1, len(q)) @ q).abs() > 1 - _SAME).any())

    def _is_promising(self, span: Tensor) -> bool:
        """Whether a subspace is small, was not drawn in, and may hold more than is known of it."""
        k = span.shape[1]
        if not 1 < k <= self._most_mixed or self._known_in(span) == k:
            return False
        same = (s for s in self._searched if s.shape[1] == k)
        return all(float((s.T @ span).square().sum()) <= k - _SAME for s in same)

    @property
    def _directions(self) -> list[Tensor]:
        return [column.q for column in self.found]

    def _known_in(self, span: Tensor) -> int:
        """How many of the directions found lie in a subspace."""
        return sum(float((q - span @ (span.T @ q)).norm()) < _APART for q in self._directions)


def _left_vectors(matrix: Tensor, most: int) -> Tensor:
    """The first left singular vectors (m, most), by the Gram matrix of the shorter side: in float64
    that is exact enough for numbers that came in float32."""
    if matrix.shape[0] <= matrix.shape[1]:
        return torch.linalg.eigh(matrix @ matrix.T).eigenvectors.flip(1)[:, :most]
    right = torch.linalg.eigh(matrix.T @ matrix).eigenvectors.flip(1)[:, :most]
    return torch.linalg.qr(matrix @ right).Q


def _largest(matrix: Tensor) -> float:
    """The largest singular value."""
    short = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    return float(torch.linalg.eigvalsh(short @ short.T)[-1].clamp(min=0).sqrt())


def _outside(q: Tensor, known: list[Tensor]) -> Tensor:
    """A direction less its part in the span of these."""
    if not known:
        return q
    basis = torch.linalg.qr(torch.stack(known).T).Q
    return q - basis @ (basis.T @ q)

"""Chance: how often pictures would be identified that a reconstruction has nothing to do with.

Reconstructions of a batch are matched to its true pictures first, and the matching already brings
the like together: one in the number of candidates is too low a chance for more than one picture.
So chance goes the same way as the truth. Every true picture's place is taken by another one of its
stratum (of the same label), which was as likely to be drawn; the gallery changes with it, so that
nobody is asked twice; then all is matched and counted again. An update that says nothing about its
pictures beyond their stratum makes the true arrangement one of these like any other, so the share
of arrangements with as many hits is a p-value: exact for batches of any size, for reconstructions
that are all alike, for clients that hold one class, and for attackers who know the labels.

All victims of an attack are arranged together, because they are told from one gallery. A picture
counts once, however often it was met: its hits are averaged over rounds and trials, and the same
picture stands in for it everywhere.

Of up to 9,999 arrangements, the p-value is (1 + those with as many hits) / 10,000, so the 1e-3 of
a verdict is ten times what can be resolved. Where chance does as well a hundred times, nothing more
is to be learned: the p-value then is a hundred over the arrangements this took (Besag and Clifford
1991), which is as valid.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

DRAWS, COUNTED = 9_999, 1_024  # arrangements at most, and those whose mean is told as chance
AS_WELL = 100
CHUNK = 64  # arrangements at a time
DEPTH = 48  # neighbours among which the nearest of the gallery is almost surely found
NOWHERE = -2.0  # below every cosine
CLOSE = 1e-9  # sums of fractions are equal up to this
SALT = 31


@dataclass(frozen=True)
class Pool:
    """Every picture of a line-up, once: those of the victims, of the gallery, and stand-ins."""

    strata: np.ndarray  # (U,) whole numbers: pictures of one may take each other's places
    gallery: np.ndarray  # (U,) whether the picture is a candidate

    def arrangements(self, moved: np.ndarray, count: int, coin: np.random.Generator) -> np.ndarray:
        """Which picture stands in each one's place, (count, U): ``moved`` change within strata."""
        _, numbers = np.unique(self.strata[moved], return_inverse=True)
        order = np.argsort(numbers, kind="stable")
        places, numbers = moved[order], numbers[order]
        at = np.tile(np.arange(len(self.strata)), (count, 1))
        at[:, places] = places[np.argsort(numbers + coin.random((count, len(places))), axis=1)]
        return at


@dataclass(frozen=True)
class Sitting:
    """What one job made of a victim's pictures, beside every picture of the pool."""

    places: np.ndarray  # (M,) where the true pictures are in the pool
    likeness: np.ndarray  # (K + 1, U), cosines; the last row is what stands for an unclaimed image
    distance: np.ndarray  # (K, U), mean squared errors, by which pictures are matched

    @functools.cached_property
    def nearest(self) -> np.ndarray:
        """The pictures of the pool that each reconstruction is most like, the nearest first."""
        return np.argsort(-self.likeness, axis=1, kind="stable")[:, :DEPTH]

    def hits(self, at: np.ndarray, gallery: np.ndarray) -> np.ndarray:
        """Whether each reconstruction is nearer to each stand-in than to all candidates, for every
        arrangement: (K + 1, D, M). The victim's own pictures are no candidates."""
        stand_ins = at[:, self.places]
        candidates = gallery.copy()
        np.put_along_axis(candidates, stand_ins, False, axis=1)
        own: np.ndarray = self.likeness[:, stand_ins] > self._closest(candidates).T[:, :, None]
        return own

    def _closest(self, candidates: np.ndarray) -> np.ndarray:
        among = candidates[:, self.nearest]
        first = among.argmax(axis=2)
        rows = np.arange(len(self.likeness))
        closest: np.ndarray = self.likeness[rows, self.nearest[rows, first]]
        for draw, row in np.argwhere(~among.any(axis=2)):
            closest[draw, row] = self.likeness[row][candidates[draw]].max(initial=NOWHERE)
        return closest

    def most(self, hits: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """What no matching can exceed, for every arrangement."""
        claimed, unclaimed = len(self.distance), max(0, len(self.places) - len(self.distance))
        by_guess: np.ndarray = np.any(hits, axis=2)
        rows = by_guess[:claimed].sum(axis=0) + unclaimed * by_guess[-1]
        least: np.ndarray = np.minimum(rows * weights.max(), hits.any(axis=0) @ weights)
        return least

    def matched(self, hits: np.ndarray, at: np.ndarray, weights: np.ndarray) -> float:
        """The hits of one arrangement, (K + 1, M), that are left when the pictures are matched as
        scoring does it: by the least total squared error."""
        guess = np.full(len(self.places), len(self.distance))
        if len(self.places) == len(self.distance) == 1:
            guess[0] = 0
        else:
            rows, columns = linear_sum_assignment(self.distance[:, at[self.places]].T)
            guess[rows] = columns
        return float(weights @ hits[guess, np.arange(len(self.places))])


@dataclass(frozen=True)
class Chance:
    """How often pictures were identified, and how often by chance."""

    rate: float  # of the true pictures
    of: int  # pictures, each once
    chance: float  # the mean rate of the arrangements
    by_chance: float  # the p-value
    draws: int


def chance_of(
    pool: Pool,
    sittings: Sequence[Sitting],
    seed: int,
    *,
    draws: int = DRAWS,
    counted: int = COUNTED,
) -> Chance:
    """The hits of one attack over all its jobs, against what chance gives."""
    pictures, met = np.unique(np.concatenate([s.places for s in sittings]), return_counts=True)
    share = np.zeros(len(pool.strata))
    share[pictures] = 1 / met
    weights = [share[sitting.places] for sitting in sittings]
    moved = np.flatnonzero(np.isin(pool.strata, pool.strata[pictures]))
    trial = _Trial(pool, sittings, weights)
    observed = float(trial.values(np.arange(len(pool.strata))[None], 0.0)[0])
    coin = np.random.default_rng([seed, SALT])
    drawn, as_well, total = 0, 0, 0.0
    by_chance: float | None = None
    while drawn < draws and (by_chance is None or drawn < counted):
        in_full = drawn < counted
        at = pool.arrangements(moved, min(CHUNK, draws - drawn), coin)
        values = trial.values(at, 0.0 if in_full else observed)
        total += float(values.sum()) if in_full else 0.0
        so_far = as_well + np.cumsum(values >= observed - CLOSE)
        if by_chance is None and so_far[-1] >= AS_WELL:
            by_chance = AS_WELL / (drawn + 1 + int(np.argmax(so_far >= AS_WELL)))
        drawn, as_well = drawn + len(at), int(so_far[-1])
    averaged = min(drawn, -(-counted // CHUNK) * CHUNK) if counted else 0
    return Chance(
        rate=observed / len(pictures),
        of=len(pictures),
        chance=total / (averaged * len(pictures)) if averaged else float("nan"),
        by_chance=by_chance if by_chance is not None else (1 + as_well) / (1 + drawn),
        draws=drawn,
    )


@dataclass(frozen=True)
class _Trial:
    """One attack's jobs, to be counted under any arrangement."""

    pool: Pool
    sittings: Sequence[Sitting]
    weights: Sequence[np.ndarray]

    def values(self, at: np.ndarray, least: float) -> np.ndarray:
        """The pictures identified under each arrangement; where they cannot be as many as
        ``least``, some number below it."""
        gallery = np.zeros(at.shape, dtype=bool)
        np.put_along_axis(gallery, at, np.broadcast_to(self.pool.gallery, at.shape), axis=1)
        hits = [sitting.hits(at, gallery) for sitting in self.sittings]
        most = np.stack(
            [s.most(h, w) for s, h, w in zip(self.sittings, hits, self.weights, strict=True)]
        )
        return np.array(
            [
                self._value([h[:, draw] for h in hits], at[draw], most[:, draw], least)
                for draw in range(len(at))
            ]
        )

    def _value(
        self, hits: list[np.ndarray], at: np.ndarray, most: np.ndarray, least: float
    ) -> float:
        total = float(most.sum())
        for job in np.flatnonzero(
            most
        ).tolist():  # without a possible hit, there is nothing to match
            if total < least - CLOSE:
                return total
            total += self.sittings[job].matched(hits[job], at, self.weights[job]) - most[job]
        return total

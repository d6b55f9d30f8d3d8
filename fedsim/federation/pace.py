"""Pace: how long a cohort is waited for, by the time its own answers take.

``train.timeout`` is the most. Once half of those who were asked have answered, or once it is known
from before how long such a half takes, the rest get ``train.patience`` times that, and never less
than a floor; so no few of them, silent or slow, set the pace. Who did not answer when it was last
asked is asked again, and gets a short grace beside the others.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Protocol

from fedsim.clients.shards import shards_of
from fedsim.core.run import Run
from fedsim.core.spec import Spec

FLOOR = 120.0  # seconds that clients elsewhere always get
SIMULATED_FLOOR = 600.0  # a worker of a simulation that was killed is started again in less
GRACE = 10.0
UNEVEN = 10.0  # shards whose sizes the server does not know: the largest over the smallest


class Clock(Protocol):
    """What waiting needs of the module `time`."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


class Pace:
    """What is known of the speed of a federation's answers, by kind of question."""

    def __init__(self, patience: float | None, floor: float = SIMULATED_FLOOR, clock: Clock = time):
        self.patience, self.floor, self.clock = patience, floor, clock
        self.silent: set[int] = set()  # who did not answer when it was last asked
        self._usual: dict[str, list[float]] = {}  # how long a half took at most, once one was there

    @classmethod
    def of(cls, spec: Spec, run: Run) -> Pace:
        """As a spec says; longer where clients train for epochs of shards that are not even."""
        patience, floor = spec.train.patience, FLOOR if run.deployed else SIMULATED_FLOOR
        if patience is not None and spec.train.local_epochs:
            patience *= UNEVEN if run.classes is not None else _unevenness(spec)
        return cls(patience, floor)

    def seconds(
        self, kind: str, waiting: Collection[int], answered: Mapping[int, float], limit: float
    ) -> float:
        """How long after the question the waiting ends, as things stand; ``answered`` says after
        how many seconds each answer came."""
        if self.patience is None:
            return limit
        relied_on = {*waiting, *answered} - self.silent
        known = [*_half(relied_on, answered), *self._usual.get(kind, [])]
        usual = max(known, default=0.0)
        if not relied_on.intersection(waiting):
            return min(limit, max(GRACE, 2 * usual) if known else self.floor)
        return min(limit, max(self.floor, self.patience * usual)) if known else limit

    def remember(self, kind: str, waiting: Collection[int], answered: Mapping[int, float]) -> None:
        """The waiting is over: these did not answer, and these did."""
        half = _half({*waiting, *answered} - self.silent, answered)
        self._usual[kind] = sorted([*half, *self._usual.get(kind, [])])[-1:]
        self.silent = (self.silent | set(waiting)) - answered.keys()


def _half(asked: Collection[int], answered: Mapping[int, float]) -> list[float]:
    """After how many seconds half of those who were asked had answered; nothing before that."""
    times = sorted(seconds for node, seconds in answered.items() if node in asked)
    half = (len(asked) + 1) // 2
    return times[half - 1 : half] if half else []


def _unevenness(spec: Spec) -> float:
    """The largest shard over the smallest."""
    sizes = [len(shard) for shard in shards_of(spec.data, spec.seed)]
    return max(sizes) / max(1, min(sizes))

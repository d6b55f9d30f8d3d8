"""Pulse: the signs of life of a job under way, and when it is to be taken for hung.

Every step that an attack reports is a sign. An attack that reports none has the time between two
signs for all of its work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from fedsim.core.spec import EngineSpec

DAY = 86_400.0
STEP = 600.0  # seconds for each step that an attack announces, where no limit is set

clock: Callable[[], float] = time.monotonic  # a machine that sleeps ages nobody


class HungError(Exception):
    """A job gave no sign of life for too long, or took too long in all."""


@dataclass(frozen=True)
class Limits:
    """How long a job may take, in seconds: from one sign of life to the next, and in all."""

    silence: float
    whole: float | None = None  # None: a day, or so much for each of its steps

    @classmethod
    def of(cls, engine: EngineSpec) -> Limits:
        return cls(engine.job_silence, engine.job_timeout)


class Pulse:
    """The clock of one try of a job."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self._began = self._last = clock()
        self._steps = 0

    def beat(self, steps: int = 0) -> None:
        """A sign of life, of a job that announces so many steps."""
        self._last, self._steps = clock(), max(self._steps, steps)

    def overdue(self) -> str | None:
        """Why the job is to be taken for hung; None while it is not."""
        now, silence = clock(), self.limits.silence
        whole = self.limits.whole or max(DAY, STEP * self._steps)
        if now - self._last > silence:
            return f"it gave no sign of life for {silence:g} s (engine.job_silence)"
        if now - self._began > whole:
            return f"it was not done after {whole:g} s (engine.job_timeout)"
        return None

"""Budget: how long a search goes, in which steps, and when it gives up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fedsim.attacks.matching.ranges import Count, Natural, Rate, Weight

ScheduleName = Literal["constant", "cosine", "step"]
OptimizerName = Literal["adam", "signed", "lbfgs"]
KeepName = Literal["last", "total", "matching"]
Phases = tuple[tuple[float, float], ...]  # from which share of the steps on, which weight


@dataclass(frozen=True)
class Budget:
    """How long and in which steps the search goes."""

    steps: int
    lr: float = 0.1
    optimizer: OptimizerName = "adam"
    schedule: ScheduleName = "cosine"
    warmup: int = 0
    langevin: float = 0.0  # noise after each step, times the step size
    phases: Phases = ((0.0, 1.0),)  # (since, weight of the matching)
    keep: KeepName = "matching"  # which iterate of the last phase is returned
    patience: int | None = None  # stop after so many steps without a better match
    save_seconds: float = 60.0

    def rate(self, step: int) -> float:
        """The step size of a step, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * done))
        if self.schedule == "step":
            return self.lr * 0.1 ** sum(done >= k / 8 for k in (3, 5, 7))
        return self.lr

    def matching_weight(self, done: float) -> float:
        return next(weight for since, weight in reversed(self.phases) if done >= since)

    def phase(self, done: float) -> int:
        return sum(done >= since for since, _ in self.phases)


@dataclass(frozen=True, kw_only=True)
class BudgetParameters:
    """``optimizer``, ``schedule``, ``langevin``: adam, cosine and none, where the attack has no
    preset of its own; ``keep``: what is returned of a seed, its last iterate, or of the last phase
    the one with the least matching loss (the default) or with the least whole objective
    (``total``); ``patience``: stop after so many steps without a better one;
    ``checkpoint_seconds``: how often a long search writes down where it is.
    """

    steps: Count = 400
    lr: Rate = 0.1
    optimizer: OptimizerName | None = None
    schedule: ScheduleName | None = None
    warmup: Natural = 0
    langevin: Weight | None = None
    keep: KeepName | None = None
    patience: Count | None = None
    checkpoint_seconds: Weight = 60.0

    def phases(self) -> Phases:
        """From which share of the steps on the matching loss has which weight."""
        return ((0.0, 1.0),)

    def budget(self) -> Budget:
        """The budget of one search."""
        return Budget(
            steps=self.steps,
            lr=self.lr,
            optimizer=self.optimizer or "adam",
            schedule=self.schedule or "cosine",
            warmup=self.warmup,
            langevin=self.langevin or 0.0,
            phases=self.phases(),
            keep=self.keep or "matching",
            patience=self.patience,
            save_seconds=self.checkpoint_seconds,
        )

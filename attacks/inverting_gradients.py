"""Inverting Gradients (Geiping et al. 2020): find images whose gradient points the same way.

Minimises 1 - cos(g(x), g*) + a TV(x), cosine over all parameters at once (their Eq. 4), with signed
Adam steps, inside the box of valid images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedsim.attacks.matching import (
    PRESET,
    Count,
    KeepName,
    MatchingAttack,
    Objective,
    ObjectiveName,
    OptimizerName,
    PresetParameters,
    Problem,
    ScheduleName,
    Term,
    Weight,
    objective_of,
    total_variation,
)


@dataclass(frozen=True, kw_only=True)
class InvertingGradients(PresetParameters, MatchingAttack):
    """``preset`` paper: the authors' 24,000 steps and eight restarts, of which the best match wins
    (what they run on ImageNet; 4,800 on CIFAR-10)."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"steps": 24_000, "seeds": 8, "keep": "last"},
        "cpu": {"steps": 400, "seeds": 1, "keep": "matching"},
    }

    steps: Count = PRESET
    seeds: Count = PRESET
    keep: KeepName = PRESET
    tv: Weight = 0.1
    optimizer: OptimizerName = "signed"
    schedule: ScheduleName = "step"
    cost: ObjectiveName = "cosine"

    def objective(self, problem: Problem) -> Objective:
        return objective_of(self.cost)

    def terms(self, problem: Problem) -> list[Term]:
        return [Term("tv", self.tv, total_variation)]

"""Inverting Gradients (Geiping et al. 2020): find images whose gradient points the same way.

Minimises 1 - cos(g(x), g*) + a TV(x), cosine over all parameters at once (their Eq. 4), with signed
Adam steps, inside the box of valid images.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.attacks.matching import (
    MatchingAttack,
    Objective,
    ObjectiveName,
    OptimizerName,
    Problem,
    ScheduleName,
    Term,
    Weight,
    objective_of,
    total_variation,
)


@dataclass(frozen=True, kw_only=True)
class InvertingGradients(MatchingAttack):
    """The authors run 4,800 to 24,000 steps; the default here is a CPU's budget."""

    tv: Weight = 0.1
    optimizer: OptimizerName = "signed"
    schedule: ScheduleName = "step"
    cost: ObjectiveName = "cosine"

    def objective(self, problem: Problem) -> Objective:
        return objective_of(self.cost)

    def terms(self, problem: Problem) -> list[Term]:
        return [Term("tv", self.tv, total_variation)]

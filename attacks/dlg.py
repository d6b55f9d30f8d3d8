"""DLG (Zhu et al. 2019): images and soft labels together, squared l2, L-BFGS."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.attacks.matching import (
    Count,
    LabelRule,
    MatchingAttack,
    Objective,
    OptimizerName,
    Problem,
    Rate,
    ScheduleName,
    SquaredL2,
)


@dataclass(frozen=True, kw_only=True)
class Dlg(MatchingAttack):
    """No prior at all: what the gradient alone determines. The authors' steps are L-BFGS."""

    steps: Count = 300
    lr: Rate = 1.0
    optimizer: OptimizerName = "lbfgs"
    schedule: ScheduleName = "constant"
    labels: LabelRule = "joint"

    def objective(self, problem: Problem) -> Objective:
        return SquaredL2()

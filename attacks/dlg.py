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
    """No prior at all, and no box: what the gradient alone determines. The authors' steps are
    L-BFGS; here a step is one evaluation, and a line search decides whether it is taken."""

    steps: Count = 300
    lr: Rate = 1.0
    optimizer: OptimizerName = "lbfgs"
    schedule: ScheduleName = "constant"
    box: bool = False
    labels: LabelRule = "joint"

    def objective(self, problem: Problem) -> Objective:
        return SquaredL2()

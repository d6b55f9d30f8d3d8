"""DLG (Zhu et al. 2019): images and soft labels together, squared l2, L-BFGS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from fedsim.attacks.matching.base import Count, LabelRule, MatchingAttack
from fedsim.attacks.matching.objectives import Objective, SquaredL2
from fedsim.attacks.matching.problem import Problem
from fedsim.attacks.matching.search import OptimizerName, ScheduleName


@dataclass(frozen=True, kw_only=True)
class Dlg(MatchingAttack):
    """No prior at all: what the gradient alone determines. The authors' steps are L-BFGS."""

    steps: Count = 300
    lr: Annotated[float, Field(gt=0)] = 1.0
    optimizer: OptimizerName = "lbfgs"
    schedule: ScheduleName = "constant"
    labels: LabelRule = "joint"

    def objective(self, problem: Problem) -> Objective:
        return SquaredL2()

"""DLG (Zhu et al. 2019): images and soft labels together, squared l2, L-BFGS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedsim.attacks.matching import (
    PRESET,
    Count,
    LabelRule,
    MatchingAttack,
    Objective,
    OptimizerName,
    PresetParameters,
    Problem,
    Rate,
    ScheduleName,
    SquaredL2,
)


@dataclass(frozen=True, kw_only=True)
class Dlg(PresetParameters, MatchingAttack):
    """No prior at all, and no box: what the gradient alone determines. ``preset`` paper: as many
    evaluations as the authors' 300 calls of L-BFGS make, 20 each; a line search decides here
    whether a step is taken."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"steps": 6000}, "cpu": {"steps": 300}}

    steps: Count = PRESET
    lr: Rate = 1.0
    optimizer: OptimizerName = "lbfgs"
    schedule: ScheduleName = "constant"
    box: bool = False
    labels: LabelRule = "joint"

    def objective(self, problem: Problem) -> Objective:
        return SquaredL2()

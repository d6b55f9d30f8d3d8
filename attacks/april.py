"""APRIL by optimisation (Lu et al. 2022): matching with a cosine on the position embedding.

Minimises |g - g*|^2 - a cos(g_pe, g*_pe) (their Eq. 11), on any ViT whose position embedding is
learned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from fedsim.attacks.matching import (
    PRESET,
    Count,
    MatchingAttack,
    Objective,
    OptimizerName,
    PositionCosine,
    PresetParameters,
    Problem,
    Rate,
    ScheduleName,
    SquaredL2,
    Term,
    Weight,
    total_variation,
)
from fedsim.attacks.transformers import transformer_parts
from fedsim.core.errors import AttackError
from fedsim.core.observation import Public


@dataclass(frozen=True, kw_only=True)
class April(PresetParameters, MatchingAttack):
    """``alpha`` weighs the position term. The paper leaves it open, and the steps as well: L-BFGS
    without a box is that of DLG's. ``tv`` is no part of it."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"steps": 6000}, "cpu": {"steps": 400}}

    steps: Count = PRESET
    lr: Rate = 1.0
    optimizer: OptimizerName = "lbfgs"
    schedule: ScheduleName = "constant"
    alpha: Weight = 1.0
    tv: Weight = 0.0
    box: bool = False

    def check_model(self, model: nn.Module, public: Public) -> None:
        super().check_model(model, public)
        position = transformer_parts(model, "april").position
        if position is None or not model.get_parameter(position).requires_grad:
            raise AttackError("april needs a learned position embedding; there is none.")
        learned = [name for name, p in model.named_parameters() if p.requires_grad]
        if position not in self.selected(model, learned):
            raise AttackError(
                "april compares the gradients of the position embedding, which parts, blocks or "
                "without leave out here."
            )

    def objective(self, problem: Problem) -> Objective:
        position = transformer_parts(problem.model, "april").position
        if position is None or position not in problem.update.tensors:
            raise AttackError(
                "april needs the gradient of a learned position embedding; the update has none."
            )
        return PositionCosine(SquaredL2(), position, self.alpha)

    def terms(self, problem: Problem) -> list[Term]:
        return [Term("tv", self.tv, total_variation)]

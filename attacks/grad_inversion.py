"""GradInversion (Yin et al. 2021): batches, by layers, BatchNorm and consistency over seeds.

alpha_G sum_l |g_l - g*_l| + TV + l2 + BN statistics + group consistency over seeds, Adam with
warm-up and cosine decay, and Langevin noise after every step (their sections 3.3 to 3.5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedsim.attacks.matching import (
    PRESET,
    BatchNormName,
    Count,
    FeaturePrior,
    GroupConsistency,
    KeepName,
    MatchingAttack,
    Natural,
    Objective,
    ObjectiveName,
    OptimizerName,
    Phases,
    PresetParameters,
    Problem,
    Rate,
    ScheduleName,
    Term,
    Weight,
    batchnorm_prior,
    l2_norm,
    objective_of,
    total_variation_of,
)


@dataclass(frozen=True, kw_only=True)
class GradInversion(PresetParameters, MatchingAttack):
    """``preset`` paper: 20,000 steps of 8 seeds with the paper's coefficients, made for ResNet-50
    at 224. ``cpu``: a few hundred steps on a small network, where one cosine over all layers and
    total variation as a mean get further.

    ``batchnorm``: which statistics the features are pulled to. ``exact`` are the batch's own, from
    the buffers the client uploaded or from a threat model that grants them; ``running`` those of
    the model that was sent; ``auto`` the best there is. ``registered``: seeds are moved onto their
    mean before they are averaged, from a quarter of the steps on and every ``register_every``.
    """

    uses: ClassVar[frozenset[str]] = MatchingAttack.uses | {"batch_statistics"}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {
            **{"steps": 20_000, "seeds": 8, "warmup": 50, "langevin": 0.2, "cost": "layer_l2"},
            **{"matching": 1e-3, "tv": 1e-4, "l2": 1e-6, "bn": 0.1, "group": 0.01},
            **{"optimizer": "adam", "schedule": "cosine", "keep": "last", "register_every": 100},
            **{"box": False, "bn_first": 1.0},
        },
        "cpu": {
            **{"steps": 400, "seeds": 4, "warmup": 10, "langevin": 0.0, "cost": "cosine"},
            **{"matching": 1.0, "tv": 0.05, "l2": 0.0, "bn": 1e-3, "group": 1e-3},
            **{"optimizer": "adam", "schedule": "cosine", "keep": "total", "register_every": 20},
            **{"box": True, "bn_first": 10.0},
        },
    }

    steps: Count = PRESET
    seeds: Count = PRESET
    warmup: Natural = PRESET
    langevin: Weight = PRESET
    optimizer: OptimizerName = PRESET
    schedule: ScheduleName = PRESET
    keep: KeepName = PRESET
    cost: ObjectiveName = PRESET
    matching: Rate = PRESET
    tv: Weight = PRESET
    l2: Weight = PRESET
    bn: Weight = PRESET
    bn_first: Weight = PRESET
    batchnorm: BatchNormName = "auto"
    group: Weight = PRESET
    registered: bool = True
    register_every: Count = PRESET
    box: bool = PRESET

    def objective(self, problem: Problem) -> Objective:
        return objective_of(self.cost)

    def phases(self) -> Phases:
        return ((0.0, self.matching),)

    def terms(self, problem: Problem) -> list[Term]:
        every = self.register_every / self.steps
        group = GroupConsistency(self.registered, problem.labels, every=every)
        return [
            Term("tv", self.tv, total_variation_of(self.preset)),
            Term("l2", self.l2, l2_norm),
            Term("group", self.group, group),
        ]

    def features(self, problem: Problem) -> FeaturePrior | None:
        # The search weighs what the matcher returns by the matching's weight; undo that here.
        return batchnorm_prior(problem, self.batchnorm, self.bn / self.matching, self.bn_first)

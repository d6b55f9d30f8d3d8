"""GradViT (Hatamizadeh et al. 2022): batches of Vision Transformers, in two phases.

First gradient matching alone, then half of it with an image prior: the BatchNorm statistics of a
CNN trained on natural images. Throughout, a patch prior, consistency over seeds, l2 and total
variation (their Eq. 1 to 11).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedsim.attacks.matching import (
    PRESET,
    Count,
    GroupConsistency,
    KeepName,
    MatchingAttack,
    Objective,
    ObjectiveName,
    OptimizerName,
    PatchPrior,
    Phases,
    PresetParameters,
    PriorNetwork,
    Problem,
    ScheduleName,
    Term,
    Weight,
    l2_norm,
    objective_of,
    total_variation_of,
)
from fedsim.core.anatomy import vit_parts
from fedsim.core.errors import ModelError
from fedsim.core.natural import natural_pictures

_NATURAL = 64  # pictures of the attacker's own that are looked at


@dataclass(frozen=True, kw_only=True)
class GradVit(PresetParameters, MatchingAttack):
    """``preset`` paper: the authors' objective, coefficients and 120,000 steps, for a GPU. ``cpu``:
    a few hundred steps on a small ViT, where one cosine over all layers and priors taken as means
    (whose weight does not depend on the size) get further.

    ``scheduled`` False has prior and matching on from the start: the paper's ablation.
    ``prior_network`` False leaves the CNN out even where the threat model grants one, and
    ``prior_scaled`` False takes its layers as they come, which is the paper's with its own CNN.
    ``registered``: seeds are moved onto their mean before they are averaged, from a quarter of the
    steps on and every ``register_every``.
    """

    uses: ClassVar[frozenset[str]] = MatchingAttack.uses | {"priors", "surrogate"}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {
            **{"steps": 120_000, "seeds": 4, "optimizer": "adam", "schedule": "cosine"},
            **{"cost": "layer_l2", "matching": 4e-3, "image": 2e-1, "patch": 1e-4},
            **{"group": 1e-2, "l2": 1e-4, "tv": 1e-4, "keep": "last", "register_every": 100},
            **{"box": False},
        },
        "cpu": {
            **{"steps": 400, "seeds": 1, "optimizer": "adam", "schedule": "cosine"},
            **{"cost": "cosine", "matching": 1.0, "image": 0.02, "patch": 0.02},
            **{"group": 1e-4, "l2": 0.0, "tv": 0.5, "keep": "total", "register_every": 20},
            **{"box": True},
        },
    }

    steps: Count = PRESET
    seeds: Count = PRESET
    optimizer: OptimizerName = PRESET
    schedule: ScheduleName = PRESET
    keep: KeepName = PRESET
    cost: ObjectiveName = PRESET
    matching: Weight = PRESET
    image: Weight = PRESET
    patch: Weight = PRESET
    group: Weight = PRESET
    l2: Weight = PRESET
    tv: Weight = PRESET
    registered: bool = True
    register_every: Count = PRESET
    scheduled: bool = True
    prior_network: bool = True
    prior_size: Count = 64
    prior_scaled: bool = True
    box: bool = PRESET

    def objective(self, problem: Problem) -> Objective:
        return objective_of(self.cost)

    def phases(self) -> Phases:
        if not self.scheduled:
            return ((0.0, self.matching),)
        return ((0.0, self.matching), (0.5, self.matching / 2))  # Eq. 5

    def terms(self, problem: Problem) -> list[Term]:
        every = self.register_every / self.steps
        terms = [
            *self._borders(problem),
            Term(
                "group",
                self.group,
                GroupConsistency(self.registered, problem.labels, every=every),
            ),
            Term("l2", self.l2, l2_norm),
            Term("tv", self.tv, total_variation_of(self.preset)),
        ]
        network = self._network(problem)
        if network is not None and self.image > 0:
            since = 0.5 if self.scheduled else 0.0  # Eq. 6
            terms.append(Term("image", self.image, network, since=since))
        return terms

    def _borders(self, problem: Problem) -> list[Term]:
        """The prior on the borders of patches; a network without patches has none."""
        try:
            parts = vit_parts(problem.model)
        except ModelError:
            problem.notes.append("no patch prior: this network has no patches")
            return []
        prior = PatchPrior(parts.patch_size, mean=self.preset == "cpu")
        return [Term("patch", self.patch, prior)]

    def _network(self, problem: Problem) -> PriorNetwork | None:
        if not self.prior_network:
            return None
        if not problem.view.grants("priors"):
            problem.notes.append(
                "no image prior: the threat model provides no prior network (threat.prior)"
            )
            return None
        prior, (mean, std) = problem.view.prior(), problem.view.normalisation
        model = prior.model.to(problem.device)
        natural, words = natural_pictures(problem.side), "photographs that come with packages"
        if problem.view.grants("surrogate"):
            natural, words = problem.view.surrogate[:_NATURAL], "the attacker's own pictures"
        scale = f"scaled by {words}" if self.prior_scaled else "as they come"
        problem.notes.append(f"image prior: {prior.name}, its layers {scale}")
        return PriorNetwork(
            *(model, mean, std, prior.mean, prior.std, natural, self.prior_size, problem.count),
            scaled=self.prior_scaled,
        )

"""GradViT (Hatamizadeh et al. 2022): batches of Vision Transformers, in two phases.

First gradient matching alone, then half of it with an image prior: the BatchNorm statistics of a
CNN trained on natural images. Throughout, a patch prior, consistency over seeds, l2 and total
variation (their Eq. 1 to 11).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fedsim.attacks.matching import (
    Budget,
    Count,
    GroupConsistency,
    MatchingAttack,
    Objective,
    ObjectiveName,
    PatchPrior,
    Phases,
    PriorNetwork,
    Problem,
    Term,
    Weight,
    l2_norm,
    objective_of,
    total_variation,
    total_variation_norm,
)
from fedsim.attacks.transformers import transformer_parts


@dataclass(frozen=True, kw_only=True)
class GradVit(MatchingAttack):
    """``preset`` paper: the authors' objective and coefficients, for 120,000 steps on a GPU.
    ``cpu``: a few hundred steps on a small ViT, where one cosine over all layers and priors taken
    as means (whose weight does not depend on the size) get further, and signed steps.

    ``scheduled`` False has prior and matching on from the start: the paper's ablation.
    ``prior_network`` False leaves the CNN out even where the threat model grants one.
    """

    uses: ClassVar[frozenset[str]] = MatchingAttack.uses | {"priors"}

    preset: Literal["paper", "cpu"] = "paper"
    steps: Count = 120_000
    seeds: Count = 4
    matching: Weight | None = None
    image: Weight | None = None
    patch: Weight | None = None
    group: Weight | None = None
    l2: Weight | None = None
    tv: Weight | None = None
    cost: ObjectiveName | None = None
    registered: bool = True
    scheduled: bool = True
    prior_network: bool = True
    prior_size: int = 64

    def weights(self) -> dict[str, float]:
        """The coefficients: those given, else the preset's."""
        presets = {
            "paper": {
                "matching": 4e-3,
                "image": 2e-1,
                "patch": 1e-4,
                "group": 1e-2,
                "l2": 1e-4,
                "tv": 1e-4,
            },
            "cpu": {
                "matching": 1.0,
                "image": 1e-6,
                "patch": 0.2,
                "group": 1e-4,
                "l2": 0.0,
                "tv": 1.0,
            },
        }[self.preset]
        given = {name: getattr(self, name) for name in presets}
        return {n: presets[n] if value is None else value for n, value in given.items()}

    def budget(self) -> Budget:
        small = self.preset == "cpu"
        return replace(
            super().budget(),
            optimizer=self.optimizer or ("signed" if small else "adam"),
            schedule=self.schedule or ("step" if small else "cosine"),
        )

    def objective(self, problem: Problem) -> Objective:
        return objective_of(self.cost or ("layer_l2" if self.preset == "paper" else "cosine"))

    def phases(self) -> Phases:
        weight = self.weights()["matching"]
        return ((0.0, weight), (0.5, weight / 2)) if self.scheduled else ((0.0, weight),)

    def terms(self, problem: Problem) -> list[Term]:
        parts = transformer_parts(problem.model, "gradvit")
        weights, small = self.weights(), self.preset == "cpu"
        variation = total_variation if small else total_variation_norm
        terms = [
            Term("patch", weights["patch"], PatchPrior(parts.patch_size, mean=small)),
            Term("group", weights["group"], GroupConsistency(self.registered)),
            Term("l2", weights["l2"], l2_norm),
            Term("tv", weights["tv"], variation),
        ]
        network = self._network(problem)
        if network is not None and weights["image"] > 0:
            since = 0.5 if self.scheduled else 0.0
            terms.append(Term("image", weights["image"], network, since=since))
        return terms

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
        return PriorNetwork(model, mean, std, prior.mean, prior.std, self.prior_size)

"""DeepInversion (Yin et al. 2020) on gradients: matching with BatchNorm statistics as the prior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedsim.attacks.matching import (
    FeaturePrior,
    MatchingAttack,
    Objective,
    ObjectiveName,
    Phases,
    Problem,
    Term,
    Weight,
    l2_norm,
    objective_of,
    total_variation,
    total_variation_norm,
)
from fedsim.attacks.matching.priors import batch_statistics, running_statistics, to_device
from fedsim.core.knowledge import Statistics

BatchNormName = Literal["auto", "exact", "running", "none"]

_PRESETS: dict[str, dict[str, float]] = {
    "paper": {"matching": 1e-3, "tv": 1e-4, "l2": 1e-6, "bn": 0.1, "group": 0.01, "langevin": 0.2},
    "cpu": {"matching": 1.0, "tv": 0.05, "l2": 0.0, "bn": 1e-3, "group": 1e-3, "langevin": 0.0},
}


@dataclass(frozen=True, kw_only=True)
class DeepInversion(MatchingAttack):
    """``preset`` paper: the coefficients of GradInversion's paper, made for ResNet-50 at 224.
    ``cpu``: a few hundred steps on a small network, where one cosine over all layers and total
    variation as a mean get further. Coefficients that are given win over the preset's.

    ``batchnorm``: which statistics the features are pulled to. ``exact`` are the batch's own, from
    the buffers the client uploaded or from a threat model that grants them; ``running`` those of
    the model that was sent; ``auto`` the best there is."""

    uses: ClassVar[frozenset[str]] = MatchingAttack.uses | {"batch_statistics"}

    preset: Literal["paper", "cpu"] = "paper"
    matching: Weight | None = None
    tv: Weight | None = None
    l2: Weight | None = None
    bn: Weight | None = None
    bn_first: Weight = 10.0
    batchnorm: BatchNormName = "running"
    cost: ObjectiveName | None = None

    def weight(self, name: str) -> float:
        """A coefficient: as given, else the preset's."""
        given: float | None = getattr(self, name)
        return _PRESETS[self.preset][name] if given is None else given

    def objective(self, problem: Problem) -> Objective:
        return objective_of(self.cost or ("layer_l2" if self.preset == "paper" else "cosine"))

    def phases(self) -> Phases:
        return ((0.0, self.weight("matching")),)

    def terms(self, problem: Problem) -> list[Term]:
        variation = total_variation if self.preset == "cpu" else total_variation_norm
        return [
            Term("tv", self.weight("tv"), variation),
            Term("l2", self.weight("l2"), l2_norm),
        ]

    def features(self, problem: Problem) -> FeaturePrior | None:
        # The search weighs what the matcher returns by the matching's weight; undo that here.
        relative = self.weight("bn") / max(self.weight("matching"), 1e-12)
        return batchnorm_prior(problem, self.batchnorm, relative, self.bn_first)


def batchnorm_prior(
    problem: Problem, which: BatchNormName, weight: float, first: float = 10.0
) -> FeaturePrior | None:
    """A prior on the BatchNorm features of the client's model; what it rests on is noted."""
    if weight == 0 or which == "none":
        return None
    statistics, words = _statistics(problem, which)
    if not statistics:
        problem.notes.append(f"no BatchNorm prior: {words}")
        return None
    problem.notes.append(f"BatchNorm prior: {words}")
    return FeaturePrior(to_device(statistics, problem.device), weight, first)


def _statistics(problem: Problem, which: BatchNormName) -> tuple[Statistics, str]:
    if which in ("auto", "exact"):
        if problem.view.grants("batch_statistics"):
            return problem.view.batch_statistics, "statistics of the batch, as granted"
        uploaded = batch_statistics(problem.model, problem.update)
        if uploaded:
            return uploaded, "statistics of the batch, from the uploaded buffers"
        if which == "exact":
            return {}, "the update shows no statistics of its batch"
    statistics = running_statistics(problem.model)
    return statistics, "the model's running statistics" if statistics else "it has no layer"

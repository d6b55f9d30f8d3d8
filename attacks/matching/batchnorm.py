"""BatchNorm statistics as a prior on the features of the client's own model."""

from __future__ import annotations

from typing import Literal

from fedsim.attacks.matching.priors import (
    FeaturePrior,
    batch_statistics,
    running_statistics,
    to_device,
)
from fedsim.attacks.matching.problem import Problem
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import Statistics

BatchNormName = Literal["auto", "required", "exact", "running", "none"]


def batchnorm_prior(
    problem: Problem,
    which: BatchNormName,
    weight: float,
    first: float = 10.0,
    *,
    matched: bool = True,
) -> FeaturePrior | None:
    """A prior on the BatchNorm features of the client's model; what it rests on is noted.

    ``exact`` are the batch's own statistics, from the buffers that the client uploaded or from a
    threat model that grants them; ``running`` those of the model that was sent; ``auto`` the best
    there is, and ``required`` as well, which declines where there is none. A client that takes
    several steps meets several batches with several models, whose features no single picture of
    theirs can be held to: there the prior is left out, but where no gradient of theirs is
    ``matched``.
    """
    if weight == 0 or which == "none":
        return None
    statistics, words = _statistics(problem, which)
    if statistics and matched and problem.local != "single":
        statistics, words = {}, "the client takes several steps, each with statistics of its own"
        if problem.clipped:
            words = "with this cost a clipped gradient is simulated as a step, without features"
    if not statistics:
        if which == "required":
            raise AttackError(f"there is no BatchNorm statistic to hold features to: {words}.")
        problem.notes.append(f"no BatchNorm prior: {words}")
        return None
    problem.notes.append(f"BatchNorm prior: {words}")
    return FeaturePrior(to_device(statistics, problem.device), weight, first)


def _statistics(problem: Problem, which: BatchNormName) -> tuple[Statistics, str]:
    if which in ("auto", "required", "exact"):
        if problem.view.grants("batch_statistics"):
            return problem.view.batch_statistics, "statistics of the batch, as granted"
        uploaded = batch_statistics(problem.model, problem.update)
        if uploaded:
            return uploaded, "statistics of the batch, from the uploaded buffers"
        if which == "exact":
            return {}, "the update shows no statistics of its batch"
    statistics = running_statistics(problem.model)
    return statistics, "the model's running statistics" if statistics else "it has no layer"

"""Derivatives of the matching loss: which way to them to trust, on this model and device."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedsim.attacks.matching.local_steps import PathMatcher, UnrolledMatcher
from fedsim.attacks.matching.matcher import (
    AGREEMENT,
    GradientMatcher,
    Match,
    Matcher,
    Precision,
    Way,
)
from fedsim.attacks.matching.objectives import Objective, Target
from fedsim.attacks.matching.priors import FeaturePrior
from fedsim.attacks.matching.problem import Problem, unrolled_protocol
from fedsim.core.errors import AttackError

WayName = Literal["auto", "first_order", "double"]


@dataclass(frozen=True, kw_only=True)
class DerivativeParameters:
    """``engine``: how the matching loss is differentiated (see `matcher`), ``precision`` in which
    numbers, ``compiled`` by torch.compile.
    """

    engine: WayName = "auto"
    precision: Precision = "float32"
    compiled: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the target."""
        return torch.float64 if self.precision == "float64" else torch.float32

    def matcher(
        self,
        problem: Problem,
        target: Target,
        objective: Objective,
        features: FeaturePrior | None,
        labels: Tensor,
    ) -> Matcher:
        """The matcher of the client that ``problem`` assumes, which notes why it goes this way."""

        def make(way: Way, prior: FeaturePrior | None = None) -> Matcher:
            options: dict[str, Any] = {
                "way": way,
                "precision": self.precision,
                "compiled": self.compiled and way == "first_order",
                "features": prior,
                "loss": problem.loss,
            }
            return _simulated(problem, target, objective, options)

        shape = (len(labels[:2]), problem.count, 3, problem.side, problem.side)
        trial = torch.randn(shape, generator=problem.view.coin("trial")).to(problem.device)
        # The matching alone is tried: beside a loud prior on features its derivative hides.
        matcher, words = choose_way(make, self.engine, trial, labels[:2])
        problem.notes.append(words)
        return matcher if features is None else make(matcher.way, features)


def _simulated(
    problem: Problem, target: Target, objective: Objective, options: dict[str, Any]
) -> Matcher:
    """A matcher for this kind of client, on a copy of the model."""
    model = copy.deepcopy(problem.model)
    if problem.local == "unroll":
        protocol = unrolled_protocol(problem.view)
        return UnrolledMatcher(
            model, target, objective, protocol=protocol, batches=problem.batches, **options
        )
    if problem.local == "surrogate":
        return PathMatcher(model, target, objective, delta=problem.update.tensors, **options)
    return GradientMatcher(model, target, objective, **options)


def choose_way(
    make: Callable[[Way], Matcher], engine: WayName, images: Tensor, labels: Tensor
) -> tuple[Matcher, str]:
    """The matcher to use, and why.

    ``auto`` computes one derivative both ways, on this model and device, and takes the first-order
    one, which does less work, wherever it agrees with double backward. Agreement alone decides, not
    a stopwatch: the same seed must give the same numbers.
    """
    if engine != "auto":
        return make(engine), f"engine: {engine}, as asked for"
    reference = make("double")
    try:
        fast = make("first_order")
    except AttackError as error:
        return reference, f"engine: double ({error})"
    # Two seeds run the code that several will; noise moves them off what may be a solution.
    sample, classes = images[:2], labels[:2]
    coin = torch.Generator().manual_seed(0)
    sample = sample + 0.1 * torch.randn(sample.shape, generator=coin).to(sample)
    a, seconds = _timed(fast, sample, classes)
    try:
        b, reference_seconds = _timed(reference, sample, classes)
    except torch.OutOfMemoryError:
        return fast, "engine: first_order, unchecked: double backward does not fit in memory"
    cosine = float(torch.cosine_similarity(a.images.flatten(), b.images.flatten(), dim=0))
    words = f"cosine {cosine:.6f} to double backward, {seconds / reference_seconds:.2f} of its time"
    if cosine >= AGREEMENT:
        return fast, f"engine: first_order ({words})"
    return reference, f"engine: double (first_order disagrees: {words})"


def _timed(matcher: Matcher, images: Tensor, labels: Tensor) -> tuple[Match, float]:
    matcher(images, labels)
    if images.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    match = matcher(images, labels)
    if images.device.type == "cuda":
        torch.cuda.synchronize()
    return match, max(time.perf_counter() - began, 1e-9)

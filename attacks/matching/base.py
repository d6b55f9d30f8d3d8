"""Matching attacks: from a View to the search and back; each adds only what sets it apart.

A subclass names its objective and its priors. The parameters that all share come in groups, each
beside the code that it steers: the budget, the derivative, the start, the labels, the layers to
match, and the client that is simulated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import nn

from fedsim.attacks.matching.budget import BudgetParameters
from fedsim.attacks.matching.derivatives import DerivativeParameters
from fedsim.attacks.matching.epochs import agreement, partnered
from fedsim.attacks.matching.label_rule import LabelParameters
from fedsim.attacks.matching.matcher import refuse_way
from fedsim.attacks.matching.objectives import Objective, is_scale_free, objective_of
from fedsim.attacks.matching.priors import FeaturePrior, Term
from fedsim.attacks.matching.problem import ClientParameters, Problem, refuse_local
from fedsim.attacks.matching.stages import Stage, Task, search_stages
from fedsim.attacks.matching.start import StartParameters
from fedsim.attacks.matching.target import TargetParameters
from fedsim.core.attack import Attack, Progress, Reconstruction
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View
from fedsim.core.observation import Public
from fedsim.core.spec import Spec

# In the order of the notebooks that searches under way have written.
SHARED_PARAMETERS = (
    *("steps", "lr", "seeds", "optimizer", "schedule", "warmup", "langevin", "engine"),
    *("precision", "compiled", "box", "init", "labels", "parts", "blocks", "masked"),
    *("adaptive", "local", "pictures", "patience", "checkpoint_seconds"),
    *("keep", "without", "without_blocks", "order", "agree"),
)


@dataclass(frozen=True, kw_only=True)
class MatchingAttack(
    ClientParameters,
    TargetParameters,
    LabelParameters,
    StartParameters,
    DerivativeParameters,
    BudgetParameters,
    Attack,
    ABC,
):
    """What all matching attacks do. Its parameters are those of its groups, last group first."""

    uses: ClassVar[frozenset[str]] = frozenset(
        {"batch_size", "optimizer", "learning_rate", "local_steps", "oracle_labels", "defenses"}
    )  # read where they are granted

    # -- what an attack says of itself ------------------------------------------------------

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"update", "weights", "architecture", "image_size", "normalisation"})

    @abstractmethod
    def objective(self, problem: Problem) -> Objective:
        """How a gradient is compared with the one observed."""

    @property
    def feels_size(self) -> bool:
        """Whether the cost changes with the size of a gradient."""
        cost = getattr(self, "cost", None)
        return cost is None or not is_scale_free(objective_of(cost))

    def check_spec(self, spec: Spec) -> None:
        refuse_local(self.local, spec, feels_size=self.feels_size)

    def check_model(self, model: nn.Module, public: Public) -> None:
        self.refuse_labels()
        if self.engine != "auto":
            refuse_way(self.engine, self.precision)
        if self.compiled and self.engine == "double":
            raise AttackError("compiled graphs have no second derivative; use engine: first_order.")
        self.selected(model, [n for n, p in model.named_parameters() if p.requires_grad])

    def refuse_labels(self) -> None:
        """Raise for a way to labels that this search has not."""

    def terms(self, problem: Problem) -> list[Term]:
        """Priors on the images."""
        return []

    def features(self, problem: Problem) -> FeaturePrior | None:
        """A prior on the BatchNorm features of the client's own model."""
        return None

    def stages(self, task: Task) -> list[Stage]:
        """What is searched, one after the other; a later stage starts from the one before."""
        return [Stage("pixels", lambda before: self.pixels(task.problem), self.budget())]

    # -- the way from a view to a reconstruction ---------------------------------------------

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        task = self.task(view, device)
        problem, wanted = task.problem, task.wanted
        best = search_stages(self.stages(task), task, lambda: self._all_terms(problem), progress)
        labels = best.labels.argmax(-1) if best.labels.is_floating_point() else best.labels
        images = best.images
        if problem.copies > 1:
            labels = labels[: problem.count // problem.copies]
            images = partnered(images, labels, problem.copies)
        if words := _in_steps(problem, best.trace):
            best.notes.append(words)
        return Reconstruction(
            images=problem.pixels(images)[:wanted].cpu(),
            labels=labels[:wanted].cpu(),
            loss=best.loss,
            trace=best.trace,
            film={step: problem.pixels(frame)[:wanted].cpu() for step, frame in best.film.items()},
            notes=[*problem.notes, *task.matcher.notes, *best.notes],
        )

    def _all_terms(self, problem: Problem) -> list[Term]:
        together = [agreement(self.agree, problem.copies)] if problem.copies > 1 else []
        return [*self.terms(problem), *together]

    def task(self, view: View, device: torch.device) -> Task:
        """What is to be matched, with which labels, and by which matcher."""
        self.refuse_labels()
        problem = self.problem(view, device)
        objective = self.objective(problem)
        if problem.clipped and self.local == "auto" and is_scale_free(objective):
            problem.local = "single"  # clipping scales a gradient, and nothing else
        features = self.features(problem)
        target = self.target(problem, objective, self.dtype)
        labels = self.find_labels(problem, self.seeds)
        if not labels.is_floating_point():
            problem.labels = labels[0]
        matcher = self.matcher(problem, target, objective, features, labels)
        about = f"{sorted(target.names)} {matcher.way} {sorted(view.granted)}"
        return Task(problem, matcher, labels, f"{self._in_words()} {about}")

    def _in_words(self) -> str:
        """The attack with its parameters, in an order that no regrouping changes: a search that is
        cut short is known again by it."""
        names = [field.name for field in fields(self)]
        ordered = [*SHARED_PARAMETERS, *(name for name in names if name not in SHARED_PARAMETERS)]
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in ordered)
        return f"{type(self).__qualname__}({values})"


def _in_steps(problem: Problem, trace: Sequence[tuple[int, float]]) -> str:
    """How hard several simulated steps were to match: what a reader of a poor picture must know."""
    if problem.local != "unroll" or len(problem.batches) < 2 or len(trace) < 2:
        return ""
    once = problem.count // problem.copies
    apart = f", searched apart in {problem.copies} epochs," if problem.copies > 1 else ""
    first, last = trace[0][1], min(loss for _, loss in trace)
    share = f"to {last / first:.0%} of its start" if first > 0 else f"to {last:.3g}"
    return (
        f"{len(problem.batches)} local steps on {once} unknown pictures{apart} were simulated in "
        f"an order that only the client knows; the loss fell {share} in {trace[-1][0]} steps of "
        f"the search: no clear picture at this budget is no proof that there is none"
    )

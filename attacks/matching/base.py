"""Matching attacks: from a View to the search and back. Each attack says only what is its own.

A subclass names its objective and its priors; here stand the parameters they all share, the
labels, what is to be matched, the start, and which kind of client is simulated.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.attacks.labels import Rule, batch_size_from_rank, momentum_pull, recover_labels
from fedsim.attacks.matching.derivatives import WayName, choose_way
from fedsim.attacks.matching.layers import Part, select
from fedsim.attacks.matching.local_steps import PathMatcher, UnrolledMatcher
from fedsim.attacks.matching.matcher import GradientMatcher, Matcher, Precision, Way
from fedsim.attacks.matching.objectives import Objective, Target
from fedsim.attacks.matching.priors import FeaturePrior, Term
from fedsim.attacks.matching.problem import Problem, batches_of, protocol_of
from fedsim.attacks.matching.search import (
    Budget,
    Film,
    Found,
    Matching,
    OptimizerName,
    ScheduleName,
    keep,
    restored,
    search,
)
from fedsim.attacks.matching.spaces import Parametrisation, Pixels
from fedsim.attacks.patch_solve import PatchSolve
from fedsim.core.attack import Progress, Reconstruction, no_progress
from fedsim.core.defense import Informed
from fedsim.core.errors import AttackError, NotGranted
from fedsim.core.knowledge import View
from fedsim.core.learning import Update
from fedsim.core.models import head_names

Count = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(ge=0)]
LocalName = Literal["auto", "single", "unroll", "surrogate"]
LabelRule = Rule | Literal["joint"]

UNROLLED_AT_MOST = 16  # local steps; beyond, auto takes the surrogate, whose cost does not grow


@dataclass
class Task:
    """What one observation asks: find images whose update is the one observed."""

    problem: Problem
    matcher: Matching
    labels: Tensor  # (S, B) classes, or (S, B, C) logits
    fingerprint: str  # tells this task from others, in checkpoints
    own: int | None = None  # images of this update, where others are searched with them


@dataclass(frozen=True)
class Stage:
    """One search of several: its space, made from the variables of the stage before."""

    name: str
    space: Callable[[list[Tensor]], Parametrisation]
    budget: Budget


@dataclass(frozen=True, kw_only=True)
class MatchingAttack(ABC):
    """Parameters every matching attack has.

    ``engine``: how the matching loss is differentiated (see `matcher`); ``seeds``: starts searched
    side by side, the best match wins; ``init``: where they start; ``labels``: how labels
    are read, or ``joint`` to search them with the images; ``parts`` and ``blocks``: which layers
    are matched; ``masked``: match only what is not zero in the update; ``adaptive``: use what is
    known of the client's defenses; ``local``: how several
    local steps are simulated; ``pictures``: how many images to find, where the protocol does not
    tell; ``patience``: stop after so many steps without a better match; ``checkpoint_seconds``: how
    often a long search writes down where it is. ``optimizer``, ``schedule``, ``langevin``: adam,
    cosine and none, where the attack has no preset of its own.
    """

    uses: ClassVar[frozenset[str]] = frozenset(
        {"batch_size", "optimizer", "learning_rate", "local_steps", "oracle_labels", "defenses"}
    )  # read where they are granted

    steps: Count = 400
    lr: Annotated[float, Field(gt=0)] = 0.1
    seeds: Count = 1
    optimizer: OptimizerName | None = None
    schedule: ScheduleName | None = None
    warmup: Annotated[int, Field(ge=0)] = 0
    langevin: Weight | None = None
    engine: WayName = "auto"
    precision: Precision = "float32"
    compiled: bool = False
    box: bool = True
    init: Literal["noise", "uniform", "grey", "patch_solve"] = "noise"
    labels: LabelRule = "auto"
    parts: list[Part] | None = None
    blocks: tuple[int, int] | None = None
    masked: bool = False
    adaptive: bool = True
    local: LocalName = "auto"
    pictures: Count | None = None
    patience: Count | None = None
    checkpoint_seconds: Weight = 60.0

    # -- what an attack says of itself ------------------------------------------------------

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"update", "weights", "architecture", "image_size", "normalisation"})

    @abstractmethod
    def objective(self, problem: Problem) -> Objective:
        """How a gradient is compared with the one observed."""

    def terms(self, problem: Problem) -> list[Term]:
        """Priors on the images."""
        return []

    def features(self, problem: Problem) -> FeaturePrior | None:
        """A prior on the BatchNorm features of the client's own model."""
        return None

    def phases(self) -> tuple[tuple[float, float], ...]:
        """From which share of the steps on the matching loss has which weight."""
        return ((0.0, 1.0),)

    def stages(self, task: Task) -> list[Stage]:
        """What is searched, one after the other; a later stage starts from the one before."""
        low, high = task.problem.box

        def pixels(before: list[Tensor]) -> Parametrisation:
            return Pixels(self._start(task.problem), low, high, boxed=self.box)

        return [Stage("pixels", pixels, self.budget())]

    # -- the way from a view to a reconstruction ---------------------------------------------

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        task = self.task(view, device)
        found = self._search(task, progress)
        classes = found.labels
        if classes.is_floating_point():
            classes = classes.argmax(-1)
        return Reconstruction(
            images=task.problem.pixels(found.images)[: task.own].cpu(),
            labels=classes[: task.own].cpu(),
            loss=found.loss,
            trace=found.trace,
            film={
                step: task.problem.pixels(frame)[: task.own].cpu()
                for step, frame in found.film.items()
            },
            notes=[*task.problem.notes, *task.matcher.notes, *found.notes],
        )

    def task(self, view: View, device: torch.device) -> Task:
        """What is to be matched, with which labels, and by which matcher."""
        problem = self._problem(view, device)
        objective, features = self.objective(problem), self.features(problem)
        target = self._target(problem, objective)
        labels = self._labels(problem)

        def make(way: Way) -> Matcher:
            options: dict[str, Any] = {
                "way": way,
                "precision": self.precision,
                "compiled": self.compiled and way == "first_order",
                "features": features,
            }
            model = copy.deepcopy(problem.model)
            if problem.local == "unroll":
                return UnrolledMatcher(
                    model,
                    target,
                    objective,
                    protocol=protocol_of(view),
                    batches=problem.batches,
                    **options,
                )
            if problem.local == "surrogate":
                delta = problem.update.tensors
                return PathMatcher(model, target, objective, delta=delta, **options)
            return GradientMatcher(model, target, objective, **options)

        shape = (min(2, self.seeds), problem.count, 3, problem.side, problem.side)
        trial = torch.randn(shape, generator=view.coin("trial")).to(device)
        matcher, words = choose_way(make, self.engine, trial, labels[:2])
        problem.notes.append(words)
        told = f"{self} {sorted(target.names)} {matcher.way} {sorted(view.granted)}"
        return Task(problem, matcher, labels, told)

    def _search(self, task: Task, progress: Progress) -> Found:
        """Every stage in turn; one that was done before a crash is not done again."""
        view, stages = task.problem.view, self.stages(task)
        whole = sum(stage.budget.steps for stage in stages)
        at, trace, film = 0, list[tuple[int, float]](), Film()
        found: Found | None = None
        for stage in stages:
            space = stage.space(found.variables if found is not None else [])
            page = view.notebook.page(f"{stage.name}-done") if view.notebook else None
            found = restored(page, space, task.matcher, task.fingerprint)
            if found is None:
                found = search(
                    task.matcher,
                    space,
                    task.labels,
                    stage.budget,
                    terms=self.terms(task.problem),
                    generator=view.coin(f"steps {stage.name}"),
                    progress=_shifted(progress, at, whole),
                    notebook=view.notebook,
                    fingerprint=f"{stage.name} {task.fingerprint}",
                )
                if page is not None and stage is not stages[-1]:
                    keep(page, found, task.matcher, task.fingerprint)
            trace += [(at + step, loss) for step, loss in found.trace]
            film |= {at + step: frame for step, frame in found.film.items()}
            at += stage.budget.steps
        assert found is not None
        if view.notebook is not None:
            for stage in stages:
                view.notebook.page(f"{stage.name}-done").clear()
        return replace(found, trace=trace, film=film)

    def budget(self) -> Budget:
        return Budget(
            steps=self.steps,
            lr=self.lr,
            optimizer=self.optimizer or "adam",
            schedule=self.schedule or "cosine",
            warmup=self.warmup,
            langevin=self.langevin or 0.0,
            phases=self.phases(),
            patience=self.patience,
            save_seconds=self.checkpoint_seconds,
        )

    def _problem(self, view: View, device: torch.device) -> Problem:
        model = view.model().to(device)
        seen = view.informed(model) if self.adaptive else Informed(view.update)
        update, notes = seen.update, list(seen.notes)
        if view.grants("batch_size"):
            size = view.batch_size
        else:
            size = batch_size_from_rank(update, model)
            notes.append(f"batch size {size}, from the rank of the update")
        pictures = self.pictures
        if view.grants("oracle_labels"):
            pictures = len(view.oracle_labels)
        batches = batches_of(view, update, size, pictures)
        local = self._local(view, update, batches, notes)
        count = pictures or size
        if local != "single":
            count = max(max(rows) for rows in batches) + 1
        masked = self.masked or seen.masked
        side = view.image_size
        return Problem(view, device, model, update, side, count, batches, local, masked, notes)

    def _local(
        self, view: View, update: Update, batches: list[list[int]], notes: list[str]
    ) -> Literal["single", "unroll", "surrogate"]:
        """How the client is simulated; ``auto`` by what is known of its steps."""
        knows = all(map(view.grants, ("optimizer", "learning_rate", "local_steps")))
        if update.kind == "gradient":
            clips = view.grants("optimizer") and knows and view.protocol().clip is not None
            return "unroll" if clips and self.local in ("auto", "unroll") else "single"
        plain = knows and view.protocol().optimizer == "sgd" and view.protocol().clip is None
        if plain and len(batches) == 1:
            return "single"
        if self.local != "auto":
            if self.local == "unroll" and not knows:
                raise AttackError("local: unroll needs the client's optimiser and learning rate.")
            return self.local
        if not knows:
            notes.append("a weight delta is matched as if it were one gradient step")
            return "single"
        return "unroll" if len(batches) <= UNROLLED_AT_MOST else "surrogate"

    def _target(self, problem: Problem, objective: Objective) -> Target:
        names = select(problem.model, problem.update.tensors, parts=self.parts, blocks=self.blocks)
        wanted = {n: problem.update.tensors[n].to(problem.device).float() for n in names}
        if self.precision == "float64":
            wanted = {n: problem.update.tensors[n].to(problem.device).double() for n in names}
        if problem.update.kind == "delta" and problem.local != "unroll":
            wanted = self._as_gradient(problem, wanted, objective)
        elif problem.update.kind == "gradient" and problem.local == "unroll":
            wanted = {name: -tensor for name, tensor in wanted.items()}  # see _protocol
        return Target(wanted, masked=problem.masked)

    def _as_gradient(
        self, problem: Problem, delta: dict[str, Tensor], objective: Objective
    ) -> dict[str, Tensor]:
        """The mean gradient behind a weight delta, as far as the protocol is known."""
        view = problem.view
        if problem.local == "surrogate" or not view.grants("learning_rate"):
            if not getattr(objective, "scale_free", False):
                raise AttackError(
                    "the size of a gradient cannot be told from this weight delta; only an "
                    "objective that compares directions (cosine) can match it."
                )
            return {name: -tensor for name, tensor in delta.items()}
        pull, decay = float(len(problem.batches)), 0.0
        if view.grants("optimizer"):
            decay = view.protocol().weight_decay
            pull = momentum_pull(view.protocol(), len(problem.batches))
        weights = dict(problem.model.named_parameters())
        scale = 1 / (view.learning_rate * pull)
        return {n: -scale * t - decay * weights[n].detach() for n, t in delta.items()}

    def _labels(self, problem: Problem) -> Tensor:
        """Labels (S, B) for every seed, or the logits of soft ones."""
        view, count = problem.view, problem.count
        if self.labels == "joint":
            classes = _classes(problem.model)
            coin = view.coin("labels")
            soft = torch.randn(self.seeds, count, classes, generator=coin)
            return soft.to(problem.device)
        if view.grants("oracle_labels"):
            labels = view.oracle_labels
        else:
            protocol, steps = None, len(problem.batches)
            knows = view.grants("optimizer") and view.grants("learning_rate")
            if knows:
                protocol = view.protocol()
            labels = recover_labels(
                problem.update, problem.model, count, self.labels, protocol=protocol, steps=steps
            )
        return labels.to(problem.device).expand(self.seeds, -1)

    def _start(self, problem: Problem) -> Tensor:
        """Where the search starts: normalised images (S, B, 3, H, W)."""
        shape = (self.seeds, problem.count, 3, problem.side, problem.side)
        coin = problem.view.coin()
        noise = torch.randn(shape, generator=coin).to(problem.device)
        if self.init == "noise":
            return noise
        if self.init == "uniform":
            return problem.normalised(torch.rand(shape, generator=coin))
        if self.init == "grey":
            return problem.normalised(torch.full(shape, 0.5)) + 0.01 * noise
        try:
            solved = PatchSolve().reconstruct(
                problem.view, device=problem.device, progress=no_progress
            )
        except (AttackError, NotGranted) as error:
            problem.notes.append(f"no closed form to start from: {error}")
            return noise
        problem.notes += [f"start: patch_solve; {note}" for note in solved.notes]
        images = solved.images[:1].expand(problem.count, -1, -1, -1)
        spread = torch.full((self.seeds, 1, 1, 1, 1), 0.1, device=problem.device)
        spread[0] = 0.0 if problem.count == 1 else 0.1  # the first seed starts at the solution
        return problem.normalised(images) + spread * noise


def _shifted(progress: Progress, before: int, whole: int) -> Progress:
    """Progress of one stage, told as that of all."""

    def report(done: int, total: int, loss: float | None = None) -> None:
        progress(before + done, whole, loss)

    return report


def _classes(model: nn.Module) -> int:
    return int(dict(model.named_parameters())[head_names(model)[0]].shape[0])

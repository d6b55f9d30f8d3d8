"""Matching attacks: from a View to the engine and back. Each attack says only what is its own.

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
from fedsim.attacks.matching.derivatives import EngineName, choose_way
from fedsim.attacks.matching.layers import Part, select
from fedsim.attacks.matching.local_steps import SurrogateMatcher, UnrolledMatcher
from fedsim.attacks.matching.matcher import GradientMatcher, Matcher, Precision, Way
from fedsim.attacks.matching.objectives import Objective, Target
from fedsim.attacks.matching.priors import FeaturePrior, Term
from fedsim.attacks.matching.problem import Setting, batches_of, protocol_of
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
class Problem:
    """What one observation asks: find images whose update is the one observed."""

    setting: Setting
    matcher: Matching
    labels: Tensor  # (S, B) classes, or (S, B, C) logits
    fingerprint: str  # tells this problem from others, in checkpoints
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
    engine: EngineName = "auto"
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
    def objective(self, setting: Setting) -> Objective:
        """How a gradient is compared with the one observed."""

    def terms(self, setting: Setting) -> list[Term]:
        """Priors on the images."""
        return []

    def features(self, setting: Setting) -> FeaturePrior | None:
        """A prior on the BatchNorm features of the client's own model."""
        return None

    def phases(self) -> tuple[tuple[float, float], ...]:
        """From which share of the steps on the matching loss has which weight."""
        return ((0.0, 1.0),)

    def stages(self, problem: Problem) -> list[Stage]:
        """What is searched, one after the other; a later stage starts from the one before."""
        low, high = problem.setting.box

        def pixels(before: list[Tensor]) -> Parametrisation:
            return Pixels(self._start(problem.setting), low, high, boxed=self.box)

        return [Stage("pixels", pixels, self.budget())]

    # -- the way from a view to a reconstruction ---------------------------------------------

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        problem = self.problem(view, device)
        found = self._search(problem, progress)
        classes = found.labels
        if classes.is_floating_point():
            classes = classes.argmax(-1)
        return Reconstruction(
            images=problem.setting.pixels(found.images)[: problem.own].cpu(),
            labels=classes[: problem.own].cpu(),
            loss=found.loss,
            trace=found.trace,
            film={
                step: problem.setting.pixels(frame)[: problem.own].cpu()
                for step, frame in found.film.items()
            },
            notes=[*problem.setting.notes, *problem.matcher.notes, *found.notes],
        )

    def problem(self, view: View, device: torch.device) -> Problem:
        """What is to be matched, with which labels, and by which matcher."""
        setting = self._setting(view, device)
        objective, features = self.objective(setting), self.features(setting)
        target = self._target(setting, objective)
        labels = self._labels(setting)

        def make(way: Way) -> Matcher:
            options: dict[str, Any] = {
                "way": way,
                "precision": self.precision,
                "compiled": self.compiled and way == "first_order",
                "features": features,
            }
            model = copy.deepcopy(setting.model)
            if setting.local == "unroll":
                return UnrolledMatcher(
                    model,
                    target,
                    objective,
                    protocol=protocol_of(view),
                    batches=setting.batches,
                    **options,
                )
            if setting.local == "surrogate":
                delta = setting.update.tensors
                return SurrogateMatcher(model, target, objective, delta=delta, **options)
            return GradientMatcher(model, target, objective, **options)

        shape = (min(2, self.seeds), setting.count, 3, setting.side, setting.side)
        trial = torch.randn(shape, generator=view.coin("trial")).to(device)
        matcher, words = choose_way(make, self.engine, trial, labels[:2])
        setting.notes.append(words)
        told = f"{self} {sorted(target.names)} {matcher.way} {sorted(view.granted)}"
        return Problem(setting, matcher, labels, told)

    def _search(self, problem: Problem, progress: Progress) -> Found:
        """Every stage in turn; one that was done before a crash is not done again."""
        view, stages = problem.setting.view, self.stages(problem)
        whole = sum(stage.budget.steps for stage in stages)
        at, trace, film = 0, list[tuple[int, float]](), Film()
        found: Found | None = None
        for stage in stages:
            space = stage.space(found.variables if found is not None else [])
            page = view.notebook.page(f"{stage.name}-done") if view.notebook else None
            found = restored(page, space, problem.matcher, problem.fingerprint)
            if found is None:
                found = search(
                    problem.matcher,
                    space,
                    problem.labels,
                    stage.budget,
                    terms=self.terms(problem.setting),
                    generator=view.coin(f"steps {stage.name}"),
                    progress=_shifted(progress, at, whole),
                    notebook=view.notebook,
                    fingerprint=f"{stage.name} {problem.fingerprint}",
                )
                if page is not None and stage is not stages[-1]:
                    keep(page, found, problem.matcher, problem.fingerprint)
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

    def _setting(self, view: View, device: torch.device) -> Setting:
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
        return Setting(view, device, model, update, side, count, batches, local, masked, notes)

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

    def _target(self, setting: Setting, objective: Objective) -> Target:
        names = select(setting.model, setting.update.tensors, parts=self.parts, blocks=self.blocks)
        wanted = {n: setting.update.tensors[n].to(setting.device).float() for n in names}
        if self.precision == "float64":
            wanted = {n: setting.update.tensors[n].to(setting.device).double() for n in names}
        if setting.update.kind == "delta" and setting.local != "unroll":
            wanted = self._as_gradient(setting, wanted, objective)
        elif setting.update.kind == "gradient" and setting.local == "unroll":
            wanted = {name: -tensor for name, tensor in wanted.items()}  # see _protocol
        return Target(wanted, masked=setting.masked)

    def _as_gradient(
        self, setting: Setting, delta: dict[str, Tensor], objective: Objective
    ) -> dict[str, Tensor]:
        """The mean gradient behind a weight delta, as far as the protocol is known."""
        view = setting.view
        if setting.local == "surrogate" or not view.grants("learning_rate"):
            if not getattr(objective, "scale_free", False):
                raise AttackError(
                    "the size of a gradient cannot be told from this weight delta; only an "
                    "objective that compares directions (cosine) can match it."
                )
            return {name: -tensor for name, tensor in delta.items()}
        pull, decay = float(len(setting.batches)), 0.0
        if view.grants("optimizer"):
            decay = view.protocol().weight_decay
            pull = momentum_pull(view.protocol(), len(setting.batches))
        weights = dict(setting.model.named_parameters())
        scale = 1 / (view.learning_rate * pull)
        return {n: -scale * t - decay * weights[n].detach() for n, t in delta.items()}

    def _labels(self, setting: Setting) -> Tensor:
        """Labels (S, B) for every seed, or the logits of soft ones."""
        view, count = setting.view, setting.count
        if self.labels == "joint":
            classes = _classes(setting.model)
            coin = view.coin("labels")
            soft = torch.randn(self.seeds, count, classes, generator=coin)
            return soft.to(setting.device)
        if view.grants("oracle_labels"):
            labels = view.oracle_labels
        else:
            protocol, steps = None, len(setting.batches)
            knows = view.grants("optimizer") and view.grants("learning_rate")
            if knows:
                protocol = view.protocol()
            labels = recover_labels(
                setting.update, setting.model, count, self.labels, protocol=protocol, steps=steps
            )
        return labels.to(setting.device).expand(self.seeds, -1)

    def _start(self, setting: Setting) -> Tensor:
        """Where the search starts: normalised images (S, B, 3, H, W)."""
        shape = (self.seeds, setting.count, 3, setting.side, setting.side)
        coin = setting.view.coin()
        noise = torch.randn(shape, generator=coin).to(setting.device)
        if self.init == "noise":
            return noise
        if self.init == "uniform":
            return setting.normalised(torch.rand(shape, generator=coin))
        if self.init == "grey":
            return setting.normalised(torch.full(shape, 0.5)) + 0.01 * noise
        try:
            solved = PatchSolve().reconstruct(
                setting.view, device=setting.device, progress=no_progress
            )
        except (AttackError, NotGranted) as error:
            setting.notes.append(f"no closed form to start from: {error}")
            return noise
        setting.notes += [f"start: patch_solve; {note}" for note in solved.notes]
        images = solved.images[:1].expand(setting.count, -1, -1, -1)
        spread = torch.full((self.seeds, 1, 1, 1, 1), 0.1, device=setting.device)
        spread[0] = 0.0 if setting.count == 1 else 0.1  # the first seed starts at the solution
        return setting.normalised(images) + spread * noise


def _shifted(progress: Progress, before: int, whole: int) -> Progress:
    """Progress of one stage, told as that of all."""

    def report(done: int, total: int, loss: float | None = None) -> None:
        progress(before + done, whole, loss)

    return report


def _classes(model: nn.Module) -> int:
    return int(dict(model.named_parameters())[head_names(model)[0]].shape[0])

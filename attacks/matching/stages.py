"""Stages: searches one after the other, each from where the one before ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fedsim.attacks.matching.budget import Budget
from fedsim.attacks.matching.priors import Term
from fedsim.attacks.matching.problem import Problem
from fedsim.attacks.matching.search import BestMatch, Film, Matching, keep, restored, search
from fedsim.attacks.matching.spaces import Parametrisation
from fedsim.core.attack import Progress


@dataclass
class Task:
    """A problem made ready to be searched: its labels, and the loss to be lowered."""

    problem: Problem
    matcher: Matching
    labels: Tensor  # (S, B) classes, or (S, B, C) logits
    fingerprint: str  # tells this task from others, in checkpoints
    wanted: int | None = None  # images of this update, where others are searched with them


@dataclass(frozen=True)
class Stage:
    """One search of several: its space, made from the variables of the stage before."""

    name: str
    space: Callable[[list[Tensor]], Parametrisation]
    budget: Budget


def search_stages(
    stages: Sequence[Stage], task: Task, terms: Callable[[], list[Term]], progress: Progress
) -> BestMatch:
    """Every stage in turn; one that was done before a crash is not done again."""
    view = task.problem.view
    whole = sum(stage.budget.steps for stage in stages)
    at, trace, film = 0, list[tuple[int, float]](), Film()
    best: BestMatch | None = None
    for stage in stages:
        space = stage.space(best.variables if best is not None else [])
        page = view.notebook.page(f"{stage.name}-done") if view.notebook else None
        best = restored(page, space, task.matcher, task.fingerprint)
        if best is None:
            best = search(
                task.matcher,
                space,
                task.labels,
                stage.budget,
                terms=terms(),
                generator=view.coin(f"steps {stage.name}"),
                progress=_shifted(progress, at, whole),
                notebook=view.notebook,
                fingerprint=f"{stage.name} {task.fingerprint}",
            )
            if page is not None and stage is not stages[-1]:
                keep(page, best, task.matcher, task.fingerprint)
        trace += [(at + step, loss) for step, loss in best.trace]
        film |= {at + step: frame for step, frame in best.film.items()}
        at += stage.budget.steps
    assert best is not None
    if view.notebook is not None:
        for stage in stages:
            view.notebook.page(f"{stage.name}-done").clear()
    return replace(best, trace=trace, film=film)


def _shifted(progress: Progress, before: int, whole: int) -> Progress:
    """Progress of one stage, reported as that of all."""

    def report(done: int, total: int, loss: float | None = None) -> None:
        progress(before + done, whole, loss)

    return report

"""The search for images whose gradient is the one observed.

It minimises a matching loss plus priors over any parametrisation of the images (see `spaces`), for
several seeds side by side. What it returns of a seed is its last iterate, or that of the least
matching loss or of the least whole objective within the last phase; which seed is decided by the
same numbers, never by the truth. A long search leaves checkpoints in the attacker's notebook and
goes on from them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fedsim.attacks.matching.budget import Budget
from fedsim.attacks.matching.lbfgs import Lbfgs
from fedsim.attacks.matching.matcher import Match
from fedsim.attacks.matching.priors import Stateful, Term
from fedsim.attacks.matching.spaces import Parametrisation
from fedsim.core.attack import Progress
from fedsim.core.errors import AttackError
from fedsim.core.notebook import Notebook, optimizer_tensors, restore_optimizer


class Matching(Protocol):
    """The matching loss of some images and its derivatives: a `Matcher`, or several as one."""

    notes: list[str]

    def __call__(self, images: Tensor, labels: Tensor) -> Match: ...
    def value(self, images: Tensor, labels: Tensor) -> Tensor: ...
    def state(self) -> dict[str, float]: ...
    def restore(self, state: Mapping[str, float]) -> None: ...


Film = dict[int, Tensor]  # the first images at a few steps, (b, 3, H, W) each, normalised
FRAMES, FILMED = 8, 2


def _milestones(steps: int) -> frozenset[int]:
    """At which steps the film has a frame: dense at first, where most happens."""
    return frozenset(max(1, round(steps * (k / (FRAMES - 1)) ** 2)) for k in range(FRAMES))


@dataclass
class BestMatch:
    """The best images of a search and how it got there."""

    images: Tensor  # (B, 3, H, W), normalised
    labels: Tensor  # (B,) or logits (B, C)
    loss: float  # its matching loss
    trace: list[tuple[int, float]]
    steps: int
    by_seed: Tensor  # the matching loss of what is kept of every seed, (S,)
    variables: list[Tensor]  # what was searched, as it is kept of every seed
    notes: list[str] = field(default_factory=list)
    film: Film = field(default_factory=dict)


def search(
    matcher: Matching,
    images: Parametrisation,
    labels: Tensor,
    budget: Budget,
    *,
    terms: Sequence[Term] = (),
    generator: torch.Generator | None = None,
    progress: Progress,
    notebook: Notebook | None = None,
    fingerprint: str = "",
) -> BestMatch:
    """Minimise matching plus priors over ``images`` (and over ``labels`` where they are soft).

    A checkpoint in ``notebook`` is continued only if it has the same ``fingerprint``.
    """
    state = _Search(matcher, images, labels, budget, terms, generator, progress, notebook)
    state.fingerprint = fingerprint
    return state.run()


def keep(page: Notebook, best: BestMatch, matcher: Matching, fingerprint: str) -> None:
    """Write down where a search ended, for the next one to start from after a crash."""
    tensors = {f"variable.{i}": v for i, v in enumerate(best.variables)}
    tensors |= {"images": best.images, "labels": best.labels, "by_seed": best.by_seed}
    tensors |= {f"film.{step}": frame for step, frame in best.film.items()}
    about = {"loss": best.loss, "trace": best.trace, "steps": best.steps, "notes": best.notes}
    state = {"matcher": matcher.state(), "fingerprint": fingerprint}
    page.save(tensors, {**about, **state})


def restored(
    page: Notebook | None, space: Parametrisation, matcher: Matching, fingerprint: str
) -> BestMatch | None:
    """Where a search ended before a crash, as `keep` wrote it; None where it did not end."""
    written = page.load() if page is not None else None
    if written is None or written[1].get("fingerprint") != fingerprint:
        return None
    tensors, about = written
    matcher.restore(about["matcher"])
    device = space.variables[0].device
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    return BestMatch(
        tensors["images"],
        tensors["labels"],
        about["loss"],
        [(int(step), float(loss)) for step, loss in about["trace"]],
        about["steps"],
        tensors["by_seed"],
        [tensors[f"variable.{i}"] for i in range(len(space.variables))],
        [*about["notes"], "resumed after a stage that was done"],
        _film(tensors),
    )


def _film(tensors: Mapping[str, Tensor]) -> Film:
    """The frames among the tensors of a page."""
    prefix = "film."
    named = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    return {int(step): named[step] for step in sorted(named, key=int)}


class _Search:
    """The state of one search; everything that a checkpoint must hold is an attribute."""

    def __init__(
        self,
        matcher: Matching,
        images: Parametrisation,
        labels: Tensor,
        budget: Budget,
        terms: Sequence[Term],
        generator: torch.Generator | None,
        progress: Progress,
        notebook: Notebook | None,
    ):
        self.matcher, self.space, self.budget, self.terms = matcher, images, budget, list(terms)
        self.generator = generator or torch.Generator().manual_seed(0)
        self.progress, self.notebook = progress, notebook
        self.soft = labels.is_floating_point()
        self.labels = labels.detach().clone().requires_grad_(True) if self.soft else labels
        self.searched = [*self.space.variables, *([self.labels] if self.soft else [])]
        seeds = len(self.space.variables[0])
        self.adam: torch.optim.Optimizer | None = None
        self.descents: list[Lbfgs] = []
        if budget.optimizer == "lbfgs":  # one per seed, so that their curvatures stay apart
            self.descents = [Lbfgs(budget.lr) for _ in range(seeds)]
        else:
            self.adam = torch.optim.Adam(self.searched, lr=budget.lr)
        self.best = [variable.detach().clone() for variable in self.searched]
        self.best_score = self.best[0].new_full((seeds,), math.inf)  # by which it is kept
        self.best_loss = self.best_score.clone()  # its matching loss
        self.best_at, self.record = 0, math.inf
        self.carried_over = False  # whether the images are still those of the phase before
        self.trace: list[tuple[int, float]] = []
        self.film: Film = {}
        self.step, self.phase = 0, self._phase(0.0)
        self.fingerprint = ""
        self.saved = time.monotonic()

    # -- the loop ---------------------------------------------------------------------------

    def run(self) -> BestMatch:
        notes: list[str] = []
        if self._resume():
            notes.append(f"resumed at step {self.step}")
        elif self.notebook is not None and self.notebook.damaged:
            notes.append("the checkpoint was damaged: started afresh")
        budget, every = self.budget, max(1, self.budget.steps // 50)
        filmed = _milestones(budget.steps)
        while self.step < budget.steps:
            done = self.step / budget.steps
            if self._phase(done) != self.phase:  # another loss: the best so far does not compare
                self.phase = self._phase(done)
                self.best_score.fill_(math.inf)
                self.record, self.carried_over, self.best_at = math.inf, True, self.step
                self.descents = [Lbfgs(budget.lr) for _ in self.descents]
            loss = self._advance(done)
            self.step += 1
            if self.step in filmed:
                leading = int(self.best_score.nan_to_num(nan=math.inf).argmin())
                self.film[self.step] = self.space.images().detach()[leading, :FILMED].clone()
            if self.step % every == 0 or self.step == budget.steps:
                value = float(loss.min())
                self.trace.append((self.step, value))
                self.progress(self.step, budget.steps, value)
                if self._stale():
                    notes.append(f"stopped early at step {self.step}: no better match since")
                    break
            self._save()
        self._finish()
        with torch.no_grad():
            for variable, best in zip(self.searched, self.best, strict=True):
                variable.copy_(best)
            images = self.space.images().detach()
        if not bool(torch.isfinite(self.best_score).any()):
            raise AttackError("the matching loss was never finite.")
        seed = int(self.best_score.nan_to_num(nan=math.inf).argmin())
        if self.notebook is not None:
            self.notebook.clear()
        return BestMatch(
            images[seed],
            self._targets()[seed],
            float(self.best_loss[seed]),
            self.trace,
            self.step,
            self.best_loss.clone(),
            self.best[: len(self.space.variables)],
            notes,
            self.film,
        )

    def _advance(self, done: float) -> Tensor:
        """One step of every seed; the matching loss before it."""
        images = self.space.images()
        match = self.matcher(images.detach(), self._targets())
        total = self._differentiate(images, match, done)
        if not self.carried_over:
            self._keep(match.value, total)
        self.carried_over = False
        rate = self.budget.rate(self.step)
        self._move(rate, total)
        if self.budget.langevin > 0:
            with torch.no_grad():
                for variable in self.space.variables:
                    noise = torch.randn(variable.shape, generator=self.generator)
                    variable.add_(noise.to(variable), alpha=rate * self.budget.langevin)
        self.space.constrain()
        return match.value

    def _phase(self, done: float) -> int:
        """Which objective is searched: it changes with the weight of the matching, and where a
        prior begins or becomes another one."""
        return self.budget.phase(done) + sum(term.phase(done) for term in self.terms)

    def _targets(self) -> Tensor:
        return self.labels.detach() if self.soft else self.labels

    def _penalties(self, images: Tensor, done: float) -> list[Tensor]:
        """The priors that count now, weighed, (S,) each."""
        penalties = [
            term.weight * term.penalty(images, done) for term in self.terms if term.active(done)
        ]
        if (on_variables := self.space.penalty()) is not None:
            penalties.append(on_variables)
        return penalties

    def _total(self, match: Tensor, penalties: Sequence[Tensor], done: float) -> Tensor:
        """The whole objective of every seed, (S,)."""
        total = self.budget.matching_weight(done) * match.detach()
        for penalty in penalties:
            total = total + penalty.detach().to(total)
        return total

    def _differentiate(self, images: Tensor, match: Match, done: float) -> Tensor:
        """Fill ``.grad`` of everything searched: matching from the matcher, priors by autograd; the
        whole objective of every seed."""
        weight = self.budget.matching_weight(done)
        penalties = self._penalties(images, done)
        for variable in self.space.variables:
            variable.grad = None
        sums = [penalty.sum() for penalty in penalties if penalty.requires_grad]
        towards = [weight * match.images, *[torch.ones_like(total) for total in sums]]
        torch.autograd.backward([images, *sums], towards, inputs=self.space.variables)
        if self.soft:
            assert match.labels is not None
            self.labels.grad = weight * match.labels
        return self._total(match.whole, penalties, done)

    def _keep(self, match: Tensor, total: Tensor) -> None:
        """Remember, seed by seed, where the match or the whole objective was least."""
        score = total if self.budget.keep == "total" else match
        better = score < self.best_score
        self._remember(better)
        self.best_score = torch.where(better, score.to(self.best_score), self.best_score)
        self.best_loss = torch.where(better, match.to(self.best_loss), self.best_loss)

    def _remember(self, which: Tensor) -> None:
        """Take the present variables of these seeds, (S,), for the best."""
        self.best = [
            torch.where(which.view(-1, *[1] * (best.dim() - 1)), variable.detach(), best)
            for variable, best in zip(self.searched, self.best, strict=True)
        ]

    def _finish(self) -> None:
        """Look at the last iterate, and take it where that is asked for. The last of L-BFGS is the
        last that its line search accepted."""
        for seed, descent in enumerate(self.descents):
            if descent.point is not None:
                self._place(seed, descent.point)
        images, done = self.space.images().detach(), 1 - 1e-9
        match = self.matcher(images, self._targets())
        with torch.no_grad():
            total = self._total(match.whole, self._penalties(images, done), done)
        if self.budget.keep != "last":
            self._keep(match.value, total)
            return
        finite = torch.isfinite(match.value)  # a seed that ran away has no last iterate
        self._remember(finite)
        self.best_score = self.best_loss = torch.where(finite, match.value, self.best_loss)

    # -- steps ------------------------------------------------------------------------------

    def _move(self, rate: float, total: Tensor) -> None:
        if self.adam is None:
            self._move_lbfgs(rate, total)
            return
        self.adam.param_groups[0]["lr"] = rate
        if self.budget.optimizer == "signed":
            for variable in self.searched:
                assert variable.grad is not None
                variable.grad.sign_()
        self.adam.step()

    def _move_lbfgs(self, rate: float, total: Tensor) -> None:
        gradients = [variable.grad for variable in self.searched]
        points = [self._point(seed) for seed in range(len(self.descents))]
        slopes = [
            torch.cat([g[seed].flatten() for g in gradients if g is not None])
            for seed in range(len(self.descents))
        ]
        free = self._free(points, slopes)
        for seed, descent in enumerate(self.descents):
            descent.rate = rate
            value = float(total[seed])
            self._place(seed, descent.next(points[seed], value, slopes[seed], free[seed]))

    def _free(self, points: list[Tensor], slopes: list[Tensor]) -> list[Tensor]:
        """Which numbers of every seed may follow the negative gradient without leaving the box."""
        for seed, (point, slope) in enumerate(zip(points, slopes, strict=True)):
            self._place(seed, point - 1e-3 * slope.sign())
        self.space.constrain()
        stayed = [self._point(seed) == point for seed, point in enumerate(points)]
        return [(~held | (s == 0)).to(s) for held, s in zip(stayed, slopes, strict=True)]

    def _point(self, seed: int) -> Tensor:
        """All that is searched of one seed, as one vector."""
        return torch.cat([variable.detach()[seed].flatten() for variable in self.searched])

    def _place(self, seed: int, point: Tensor) -> None:
        with torch.no_grad():
            sizes = [variable[seed].numel() for variable in self.searched]
            for variable, part in zip(self.searched, point.split(sizes), strict=True):
                variable[seed].copy_(part.view_as(variable[seed]))

    def _stale(self) -> bool:
        if self.budget.patience is None or self.phase != self._phase(1 - 1e-9):
            return False
        best = float(self.best_score.min())
        if best < self.record:
            self.record, self.best_at = best, self.step
        return self.step - self.best_at >= self.budget.patience

    # -- checkpoints ------------------------------------------------------------------------

    def _accepted(self) -> list[Tensor]:
        """Where the search stands: what a line search only tries is not there yet."""
        proposed = [variable.detach().clone() for variable in self.searched]
        for seed, descent in enumerate(self.descents):
            if descent.point is not None:
                self._place(seed, descent.point)
        accepted = [variable.detach().clone() for variable in self.searched]
        with torch.no_grad():
            for variable, tried in zip(self.searched, proposed, strict=True):
                variable.copy_(tried)
        return accepted

    def _save(self) -> None:
        if self.notebook is None or self.step >= self.budget.steps:
            return
        if time.monotonic() - self.saved < self.budget.save_seconds:
            return
        tensors = {"best_loss": self.best_loss, "best_score": self.best_score}
        tensors |= {f"variable.{i}": v for i, v in enumerate(self._accepted())}
        tensors |= {f"best.{i}": v for i, v in enumerate(self.best)}
        tensors["generator"] = self.generator.get_state()
        tensors |= {f"film.{step}": frame for step, frame in self.film.items()}
        for index, term in enumerate(self.terms):
            if isinstance(term.penalty, Stateful):
                tensors |= {f"term.{index}.{k}": v for k, v in term.penalty.state().items()}
        about: dict[str, Any] = {
            "fingerprint": self.fingerprint,
            "step": self.step,
            "phase": self.phase,
            "trace": self.trace,
            "best_at": self.best_at,
            "record": self.record if math.isfinite(self.record) else None,
            "matcher": self.matcher.state(),
        }
        if self.adam is not None:
            tensors |= optimizer_tensors(self.adam)
        self.notebook.save(tensors, about)
        self.saved = time.monotonic()

    def _resume(self) -> bool:
        """Go on from a checkpoint; L-BFGS starts its curvature afresh, at its best point."""
        page = self.notebook.load() if self.notebook is not None else None
        if page is None:
            return False
        tensors, about = page
        if about.get("fingerprint") != self.fingerprint:  # written by another attack
            return False
        device = self.best_loss.device
        with torch.no_grad():
            for index, variable in enumerate(self.searched):
                variable.copy_(tensors[f"variable.{index}"])
        self.best = [tensors[f"best.{i}"].to(device) for i in range(len(self.searched))]
        self.best_loss = tensors["best_loss"].to(device)
        self.best_score = tensors["best_score"].to(device)
        self.generator.set_state(tensors["generator"])
        self.step, self.best_at = int(about["step"]), int(about["best_at"])
        self.phase = int(about["phase"])
        self.record = math.inf if about["record"] is None else float(about["record"])
        self.matcher.restore(about["matcher"])
        for index, term in enumerate(self.terms):
            if isinstance(term.penalty, Stateful):
                prefix = f"term.{index}."
                term_state = {
                    k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)
                }
                term.penalty.restore({k: v.to(device) for k, v in term_state.items()})
        self.trace = [(int(step), float(loss)) for step, loss in about["trace"]]
        self.film = {step: frame.to(device) for step, frame in _film(tensors).items()}
        if self.adam is not None:
            restore_optimizer(self.adam, tensors)
        return True

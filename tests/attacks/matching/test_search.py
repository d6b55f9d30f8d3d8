"""The search: steps and schedules do what they say, and nothing is lost when it is cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fedsim.attacks.matching.budget import Phases
from fedsim.attacks.matching.local_steps import PathMatcher
from fedsim.attacks.matching.matcher import GradientMatcher, Matcher
from fedsim.attacks.matching.objectives import Cosine, Target
from fedsim.attacks.matching.priors import GroupConsistency, Term, total_variation
from fedsim.attacks.matching.search import BestMatch, Budget, search
from fedsim.attacks.matching.spaces import Pixels
from fedsim.core.attack import Progress, no_progress
from fedsim.core.errors import AttackError
from fedsim.core.learning import Protocol, local_update
from fedsim.core.notebook import Notebook
from tests.attacks.matching.conftest import pictures, target_of, tiny

LOW, HIGH = torch.full((3, 1, 1), -1.0), torch.full((3, 1, 1), 1.0)


def problem() -> tuple[nn.Module, Target, torch.Tensor, torch.Tensor]:
    model, truth, labels = tiny(), pictures(1, 1, 4).clamp(-1, 1), torch.tensor([2])
    return model, target_of(model, truth, labels), truth, labels[None]


def matcher_of(model: nn.Module, target: Target) -> Matcher:
    return GradientMatcher(copy.deepcopy(model), target, Cosine())


@pytest.mark.parametrize("optimizer", ["adam", "signed", "lbfgs"])
def test_every_kind_of_step_lowers_the_loss(optimizer: str) -> None:
    model, target, _, labels = problem()
    budget = Budget(60, lr=1.0 if optimizer == "lbfgs" else 0.05, optimizer=optimizer)  # type: ignore[arg-type]
    start = pictures(1, 2, 4)[None]
    found = search(
        matcher_of(model, target), Pixels(start, LOW, HIGH), labels, budget, progress=no_progress
    )
    assert found.loss < 0.4 * float(matcher_of(model, target).value(start, labels))
    assert float(found.images.min()) >= -1
    assert float(found.images.max()) <= 1


def test_the_best_iterate_is_that_of_the_matching_loss() -> None:
    model, target, _, labels = problem()
    start = pictures(1, 2, 4)[None]
    flat = Term("tv", 100.0, total_variation)  # drags the images away from the match
    found = search(
        matcher_of(model, target),
        Pixels(start, LOW, HIGH),
        labels,
        Budget(40),
        terms=[flat],
        progress=no_progress,
    )
    assert found.loss <= min(loss for _, loss in found.trace)
    assert float(matcher_of(model, target).value(found.images[None], labels)) == pytest.approx(
        found.loss, rel=1e-4
    )


def kept(keep: str, phases: Phases = ((0.0, 1.0),), steps: int = 40) -> BestMatch:
    model, target, truth, labels = problem()
    drag = Term("tv", 100.0, total_variation, since=phases[-1][0])
    return search(
        matcher_of(model, target),
        Pixels((truth + 0.1 * pictures(1, 2, 4))[None], LOW, HIGH),
        labels,
        Budget(steps, keep=keep, phases=phases),  # type: ignore[arg-type]
        terms=[drag],
        progress=no_progress,
    )


def test_of_a_search_its_last_iterate_can_be_kept_or_that_of_the_least_objective() -> None:
    def objective(found: BestMatch) -> float:
        return found.loss + 100.0 * float(total_variation(found.images[None]))

    matching, total, last = (kept(name) for name in ("matching", "total", "last"))
    assert matching.loss < min(total.loss, last.loss)
    assert objective(total) <= min(objective(matching), objective(last)) + 1e-6
    # the term drags on to the end, so the last iterate is the flattest of all
    assert float(total_variation(last.images[None])) < float(total_variation(matching.images[None]))


@pytest.mark.parametrize("keep", ["matching", "total", "last"])
def test_a_later_phase_returns_nothing_of_the_one_before(keep: str) -> None:
    """Matching alone is best before a prior begins to drag: that image must not come back."""
    found = kept(keep, phases=((0.0, 1.0), (0.5, 0.5)))
    first_half = [loss for step, loss in found.trace if step <= 20]
    assert found.loss > 1.01 * min(first_half)


def test_lbfgs_never_ends_worse_than_its_best_and_stays_in_the_box() -> None:
    model, target, _, labels = problem()
    for rate in (1.0, 1e4):  # with steps that are far too long as well
        found = search(
            matcher_of(model, target),
            Pixels(pictures(1, 2, 4)[None], LOW, HIGH),
            labels,
            Budget(120, lr=rate, optimizer="lbfgs", schedule="constant", keep="last"),
            progress=no_progress,
        )
        assert found.loss <= min(loss for _, loss in found.trace) + 1e-6
        assert found.loss < 1e-3
        assert float(found.images.abs().max()) <= 1


def test_the_best_of_several_seeds_wins() -> None:
    model, target, truth, labels = problem()
    starts = torch.stack([pictures(1, 2, 4), truth, pictures(1, 3, 4)])
    found = search(
        matcher_of(model, target),
        Pixels(starts, LOW, HIGH),
        labels.expand(3, -1),
        Budget(2, lr=1e-6),
        progress=no_progress,
    )
    assert int(found.by_seed.argmin()) == 1
    assert torch.allclose(found.images, truth, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
@pytest.mark.parametrize("keep", ["last", "total"])
def test_where_a_prior_begins_what_was_found_before_does_not_come_back(
    keep: str, optimizer: str
) -> None:
    """A prior alone may begin, without a change of the matching's weight."""
    model, target, truth, labels = problem()

    def towards_grey(images: torch.Tensor, done: float = 0.0) -> torch.Tensor:
        return images.square().flatten(1).mean(1)

    found = search(
        matcher_of(model, target),
        Pixels((truth + 0.1 * pictures(1, 2, 4))[None], LOW, HIGH),
        labels,
        Budget(120, lr=0.05 if optimizer == "adam" else 1.0, optimizer=optimizer, keep=keep),  # type: ignore[arg-type]
        terms=[Term("grey", 1000.0, towards_grey, since=0.5)],
        progress=no_progress,
    )
    assert float(found.images.square().mean()) < 0.05 * float(truth.square().mean())


def test_patience_waits_for_the_last_phase() -> None:
    model, target, _, labels = problem()
    budget = Budget(400, lr=1e-12, patience=40, phases=((0.0, 1.0), (0.5, 0.5)))
    found = search(
        matcher_of(model, target),
        Pixels(pictures(1, 2, 4)[None], LOW, HIGH),
        labels,
        budget,
        progress=no_progress,
    )
    assert 240 <= found.steps < 300


def test_patience_ends_a_search_that_stands_still() -> None:
    model, target, _, labels = problem()
    found = search(
        matcher_of(model, target),
        Pixels(pictures(1, 2, 4)[None], LOW, HIGH),
        labels,
        Budget(1000, lr=1e-12, patience=40),
        progress=no_progress,
    )
    assert found.steps < 200
    assert any("stopped early" in note for note in found.notes)


class InterruptedSearchError(Exception):
    pass


@pytest.mark.parametrize("langevin", [0.0, 0.1])
def test_a_search_goes_on_from_its_notebook_with_the_same_numbers(
    tmp_path: Path, langevin: float
) -> None:
    model, target, _, labels = problem()
    budget = Budget(40, langevin=langevin, save_seconds=0.0)
    start = pictures(1, 2, 4)[None]
    notebook = Notebook(tmp_path / "page.safetensors")

    def run(stop_at: int | None, page: Notebook | None) -> torch.Tensor:
        def progress(done: int, total: int, loss: float | None = None) -> None:
            if stop_at is not None and done >= stop_at:
                raise InterruptedSearchError

        found = search(
            matcher_of(model, target),
            Pixels(start, LOW, HIGH),
            labels,
            budget,
            generator=torch.Generator().manual_seed(0),
            progress=progress,
            notebook=page,
        )
        return found.images

    whole = run(None, None)
    with pytest.raises(InterruptedSearchError):
        run(17, notebook)
    assert notebook.path.is_file()
    assert torch.equal(run(None, notebook), whole)
    assert not notebook.path.exists()


def assert_alike_when_resumed(
    tmp_path: Path, run: Callable[..., torch.Tensor], stop_at: int
) -> None:
    """A run that is cut at a step and gone on with ends where a whole one does."""

    def stops(done: int, total: int, loss: float | None = None) -> None:
        if done >= stop_at:
            raise InterruptedSearchError

    notebook = Notebook(tmp_path / "page.safetensors")
    whole = run(None, no_progress)
    with pytest.raises(InterruptedSearchError):
        run(notebook, stops)
    assert notebook.path.is_file()
    assert torch.equal(run(notebook, no_progress), whole)


@pytest.mark.parametrize("stop_at", [21, 27])
def test_phases_and_the_consensus_of_seeds_survive_a_resume(tmp_path: Path, stop_at: int) -> None:
    model, target, _, labels = problem()
    starts = torch.stack([pictures(1, seed, 4) for seed in (12, 13)])

    def run(page: Notebook | None, progress: Progress) -> torch.Tensor:
        budget = Budget(40, phases=((0.0, 1.0), (0.5, 0.5)), save_seconds=0.0)
        group = Term("group", 0.1, GroupConsistency(registered=True, every=1 / 3))
        return search(
            matcher_of(model, target),
            Pixels(starts, LOW, HIGH),
            labels.expand(2, -1),
            budget,
            terms=[group],
            progress=progress,
            notebook=page,
        ).images

    assert_alike_when_resumed(tmp_path, run, stop_at)


def test_the_surrogate_point_survives_a_resume(tmp_path: Path) -> None:
    protocol = Protocol(upload="delta", lr=0.5, mean=(0, 0, 0), std=(1, 1, 1))
    labels = torch.tensor([0, 1])
    update = local_update(tiny(), [(pictures(2, 0, 4), labels)] * 8, protocol)
    target = Target({n: -t for n, t in update.tensors.items()})

    def run(page: Notebook | None, progress: Progress) -> torch.Tensor:
        matcher = PathMatcher(tiny(), target, Cosine(), delta=update.tensors)
        space = Pixels(pictures(2, 5, 4)[None], LOW, HIGH)
        budget = Budget(40, save_seconds=0.0)
        return search(matcher, space, labels[None], budget, progress=progress, notebook=page).images

    assert_alike_when_resumed(tmp_path, run, 23)


def test_a_page_of_another_search_is_not_gone_on_with(tmp_path: Path) -> None:
    model, target, _, labels = problem()
    notebook = Notebook(tmp_path / "page.safetensors")

    def run(fingerprint: str, progress: Progress) -> list[str]:
        return search(
            matcher_of(model, target),
            Pixels(pictures(1, 2, 4)[None], LOW, HIGH),
            labels,
            Budget(20, save_seconds=0.0),
            progress=progress,
            notebook=notebook,
            fingerprint=fingerprint,
        ).notes

    def stops(done: int, total: int, loss: float | None = None) -> None:
        if done >= 10:
            raise InterruptedSearchError

    with pytest.raises(InterruptedSearchError):
        run("one", stops)
    assert run("another", no_progress) == []
    with pytest.raises(InterruptedSearchError):
        run("one", stops)
    assert run("one", no_progress) == ["resumed at step 9"]


def test_a_loss_that_is_never_finite_is_an_error() -> None:
    model, target, _, labels = problem()
    with torch.no_grad():
        model[1].weight.fill_(float("nan"))
    with pytest.raises(AttackError, match="never finite"):
        search(
            matcher_of(model, target),
            Pixels(pictures(1, 2, 4)[None], LOW, HIGH),
            labels,
            Budget(3),
            progress=no_progress,
        )

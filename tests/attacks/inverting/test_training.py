"""Training: pages for the clients and the steps, which belong to what they were made for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedsim.attacks.inverting import Course, Layout, Rehearsal, Training
from fedsim.attacks.inverting import training as module
from fedsim.core.attack import no_progress
from tests.attacks.conftest import view_of
from tests.staging import convnet_observation, photos

COURSE = Course(clients=24, epochs=3, batch=8, width=16, lr=1e-2, decay=0.0, dropout=0.1)


@pytest.fixture
def rehearsal() -> Rehearsal:
    observation, images = convnet_observation()
    surrogate, _ = photos(images.shape[-1], range(40, 52))
    told = {"entries": 100, "seed": 3, "device": torch.device("cpu")}
    return Rehearsal(view_of(observation), surrogate, Layout(1), **told)


def test_the_rate_rises_and_falls() -> None:
    rates = [COURSE.rate(step) for step in range(COURSE.steps)]
    assert COURSE.steps == 9
    assert max(rates) == COURSE.lr
    assert rates[-1] < 0.2 * COURSE.lr
    assert sorted(rates[1:], reverse=True) == rates[1:]


def test_the_loss_falls(rehearsal: Rehearsal, tmp_path: Path) -> None:
    course = Course(clients=24, epochs=40, batch=8, width=32, lr=1e-2, decay=0.0, dropout=0.0)
    training = Training(course, rehearsal, tmp_path / "draft.safetensors", {}, seed=0)
    net = training.run(no_progress)
    some = module.simulated(rehearsal, range(24), training.notebook, {}, lambda done: None)
    blank = float(net.wanted(some).square().mean())
    assert training.losses[-1][1] < 0.2 * blank


def test_pages_of_other_weights_are_not_gone_on_with(rehearsal: Rehearsal, tmp_path: Path) -> None:
    path = tmp_path / "draft.safetensors"

    def states(about: dict[str, str]) -> list[torch.Tensor]:
        return list(Training(COURSE, rehearsal, path, about, seed=0).run(no_progress).parameters())

    first = states({"weights": "one"})
    assert len(list(tmp_path.iterdir())) == 2
    drawn: list[int] = []
    example = rehearsal.example
    rehearsal.example = lambda number: (drawn.append(number), example(number))[1]  # type: ignore
    again = states({"weights": "one"})
    assert not drawn
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    states({"weights": "two"})
    assert drawn == list(range(24))


def test_what_was_made_is_cleared(rehearsal: Rehearsal, tmp_path: Path) -> None:
    training = Training(COURSE, rehearsal, tmp_path / "draft.safetensors", {}, seed=0)
    training.run(no_progress)
    training.clear()
    assert not list(tmp_path.iterdir())

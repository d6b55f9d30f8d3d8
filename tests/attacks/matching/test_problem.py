"""What stands behind one update: which pictures in which step, and in which numbers."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks.inverting_gradients import InvertingGradients
from fedsim.attacks.matching.problem import unrolled_protocol
from fedsim.core.knowledge import THREATS, Announced, View
from fedsim.core.learning import local_update
from fedsim.core.losses import Loss
from fedsim.core.observation import Observation, Public
from fedsim.core.spec import DataSpec, Spec, TrainSpec
from tests.staging import CPU, convnet, photos


def view_of(train: TrainSpec, batches: int, threat: str = "C") -> View:
    images, labels = photos(16, range(0, 70 * train.batch_size, 70))
    public = Public.of(Spec(data=DataSpec(image_size=16), train=train), num_classes=8)
    update = local_update(convnet(), [(images, labels)] * batches, public.protocol)
    observation = Observation(1, 0, convnet().state_dict(), update, public)
    return View(observation, THREATS[threat].grants, Announced(convnet))


DELTA = {"upload": "delta", "batch_size": 2, "lr": 0.05}


@pytest.mark.parametrize(
    ("train", "batches", "pictures", "expected"),
    [
        ({"batch_size": 3}, 1, None, [[0, 1, 2]]),
        ({**DELTA, "local_steps": 3}, 3, None, [[0, 1], [2, 3], [4, 5]]),  # new ones each time
        ({**DELTA, "local_steps": 3}, 3, 2, [[0, 1], [0, 1], [0, 1]]),
        ({**DELTA, "local_steps": 3}, 3, 4, [[0, 1], [2, 3], [0, 1]]),
        ({**DELTA, "local_epochs": 2}, 4, None, [[0, 1], [2, 3]] * 2),  # the same ones again
        (
            {**DELTA, "local_epochs": 2, "augment": [{"name": "RandomHorizontalFlip"}]},
            *(4, None, [[0, 1], [2, 3], [4, 5], [6, 7]]),  # new views of them
        ),
    ],
)
def test_steps_take_new_pictures_and_epochs_the_same_ones(
    train: dict, batches: int, pictures: int | None, expected: list[list[int]]
) -> None:
    view = view_of(TrainSpec(**train), batches)
    problem = InvertingGradients(pictures=pictures).problem(view, CPU)
    assert problem.batches == expected


def test_who_does_not_know_the_steps_assumes_one() -> None:
    view = view_of(TrainSpec(**DELTA, local_steps=3), 3, "B")
    assert InvertingGradients().problem(view, CPU).batches == [[0, 1]]


def test_a_clipped_gradient_is_unrolled_as_one_step_of_size_one() -> None:
    gradient = unrolled_protocol(view_of(TrainSpec(clip=0.5, lr=0.05), 1))
    assert (gradient.lr, gradient.momentum, gradient.clip) == (1.0, 0.0, 0.5)
    delta = unrolled_protocol(view_of(TrainSpec(**DELTA, local_steps=2, momentum=0.9), 2))
    assert (delta.lr, delta.momentum) == (0.05, 0.9)


def test_pixels_and_normalised_images_are_each_others_inverse() -> None:
    problem = InvertingGradients(steps=1).task(view_of(TrainSpec(), 1), CPU).problem
    images, _ = photos(16, [70])
    low, high = problem.box
    assert torch.equal(problem.normalised(torch.zeros(1, 3, 2, 2)), low.expand(1, 3, 2, 2))
    assert torch.allclose(problem.pixels(problem.normalised(images)), images, atol=1e-6)
    assert float(problem.pixels(high + 1).max()) == 1.0


def test_the_clients_loss_is_matched_by_who_may_know_it() -> None:
    train = TrainSpec.model_validate({"loss": {"label_smoothing": 0.5}})
    assert InvertingGradients().problem(view_of(train, 1), CPU).loss == train.loss
    assert InvertingGradients().problem(view_of(train, 1, "B"), CPU).loss == Loss()
    task = InvertingGradients(steps=1).task(view_of(train, 1), CPU)
    images, labels = photos(16, [0])
    truth = task.problem.normalised(images)[None]
    assert float(task.matcher.value(truth, labels[None])) < 1e-6
    plain = InvertingGradients(steps=1).task(view_of(train, 1, "B"), CPU)
    assert float(plain.matcher.value(truth, labels[None])) > 1e-4

"""Reading the head: sizes, counts, and whose pictures stand behind an update."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedsim.attacks.manoeuvres.fishing import Fishing
from fedsim.attacks.manoeuvres.reading import (
    clients_behind,
    gradient_scale,
    group_of,
    only_sums,
    pictures_expected,
    read_head,
    scaled,
    without_head,
)
from fedsim.core.learning import Update
from fedsim.core.spec import TrainSpec, Upload
from tests.attacks.manoeuvres.stage import SUMS, Stage, pictures


def test_one_step_of_sgd_is_read_as_the_gradient() -> None:
    images, labels, sent = pictures(4), torch.arange(4), None
    readings = []
    for upload in (Upload.GRADIENT, Upload.DELTA):
        train = TrainSpec(batch_size=4, mode="eval", upload=upload, lr=0.1)
        stage = Stage(Fishing(target=1, row=1.0), train=train)
        sent = stage.play(images, labels)
        readings.append(read_head(sent, stage.factory()))
    one, other = readings
    assert one is not None
    assert other is not None
    kept = torch.arange(100) != 1  # the target's bias is too large to show a step
    assert torch.allclose(one.bias[kept], other.bias[kept], atol=1e-6)
    assert torch.allclose(one.weight, other.weight, atol=1e-4)


@pytest.mark.parametrize(
    "train",
    [TrainSpec(clip=1.0), TrainSpec(upload=Upload.DELTA, optimizer="adamw")],
)
def test_the_size_of_some_updates_is_not_known(train: TrainSpec) -> None:
    stage = Stage(Fishing(target=1), train=train)
    seen = stage.play(pictures(1), torch.arange(1))
    assert gradient_scale(seen) is None
    head = read_head(seen, stage.factory())
    assert head is not None
    assert not head.known


def test_the_clients_behind_a_mean_are_counted_by_its_pictures() -> None:
    stage = Stage(Fishing(target=1))
    seen = stage.play(pictures(8), torch.arange(8))
    assert clients_behind(seen) == 1
    assert clients_behind(replace(seen, pictures=24)) == 3


def test_a_sum_is_remembered_of_the_cohort() -> None:
    alone, summed = Stage(Fishing()), Stage(Fishing(), defenses=SUMS)
    assert group_of(3, alone.public) == "3"
    assert group_of(3, summed.public) == "cohort"
    assert only_sums(summed.public)
    assert not only_sums(alone.public)
    assert pictures_expected(alone.brief(cohort=(0, 1))) == 8
    assert pictures_expected(summed.brief(cohort=(0, 1))) == 16


def test_a_delta_keeps_its_size() -> None:
    tensors = {"head.weight": torch.ones(2), "body": torch.ones(2)}
    gradient, delta = (Update(kind, tensors) for kind in Upload)
    assert scaled(gradient, 3.0, 1).tensors["body"].tolist() == [3, 3]
    assert scaled(delta, 3.0, 1) is delta
    stage = Stage(Fishing())
    assert list(without_head(gradient, stage.factory()).tensors) == ["body"]

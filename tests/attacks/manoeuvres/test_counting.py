"""Counting: what is claimed of how many answered, and what is not."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks.manoeuvres.fishing import Fishing
from fedsim.core.spec import TrainSpec, Upload
from fedsim.defenses.withheld import Withheld
from tests.attacks.manoeuvres.stage import (
    RESNET,
    Stage,
    decibels,
    pictures,
)

ALONE = torch.arange(8)


def test_two_pictures_of_the_target_are_told_to_be_mixed() -> None:
    stage = Stage(Fishing(target=3))
    seen = stage.play(pictures(8), torch.tensor([0, 1, 3, 3, 4, 5, 6, 7]))
    isolated = stage.manoeuvre.isolate(seen)
    assert isolated.pictures == 2
    assert isolated.labels.tolist() == [3, 3]
    assert "2 pictures" in isolated.words


def test_without_the_head_the_layer_before_it_counts() -> None:
    stage = Stage(Fishing(target=3), prepare=Withheld(parts=["head"]).prepare_model)
    images = pictures(8)
    seen = stage.play(images, ALONE)
    isolated = stage.manoeuvre.isolate(seen)
    assert isolated.pictures == 1
    assert isolated.count == pytest.approx(1, abs=0.01)
    assert decibels(stage.solved(seen, isolated), images[3]) > 60
    assert "labels" not in stage.memory["0"]


def test_without_the_head_of_a_resnet_the_count_is_said_not_to_be_known() -> None:
    prepare = Withheld(parts=["head"]).prepare_model
    stage = Stage(Fishing(target=3), model=RESNET, prepare=prepare)
    isolated = stage.manoeuvre.isolate(stage.play(pictures(8), ALONE))
    assert isolated.count is None
    assert "not known" in isolated.words


@pytest.mark.parametrize(("times", "claimed"), [(1, True), (2, False)])
def test_a_clipped_gradient_is_counted_by_a_class_that_is_absent(times: int, claimed: bool) -> None:
    train = TrainSpec(batch_size=8, mode="eval", clip=1.0)
    stage = Stage(Fishing(target=3), train=train)
    labels = torch.tensor([3] * times + list(range(10, 18 - times)))
    isolated = stage.manoeuvre.isolate(stage.play(pictures(8), labels))
    assert (isolated.pictures == 1) == claimed


# -- feature fishing ----------------------------------------------------------------------------


def test_nothing_is_claimed_of_a_gate_that_other_classes_pass() -> None:
    stage = Stage(Fishing(kind="feature", target=5))
    seen = stage.play(pictures(8), torch.tensor([5, 5, 5, 5, 5, 5, 1, 2]))
    isolated = stage.manoeuvre.isolate(seen)
    assert isolated.pictures > 1
    assert "other classes" in isolated.words


def steps_of(labels: list[int], size: int, **train) -> tuple[Stage, object]:
    """A client's delta over batches of so many pictures, fished for class 50."""
    steps = -(-len(labels) // size)
    settings = {"batch_size": size, "upload": Upload.DELTA, "lr": 0.01, "mode": "eval"}
    if "local_epochs" not in train:
        settings["local_steps"] = steps
    stage = Stage(Fishing(target=50), train=TrainSpec(**settings, **train))
    images, tags = pictures(len(labels)), torch.tensor(labels)
    sent = stage.manoeuvre.tamper(stage.brief())
    weights = stage.received(sent)
    batches = list(zip(images.split(size), tags.split(size), strict=True))
    update = stage.answer(weights, batches * train.get("local_epochs", 1))
    return stage, stage.sighting(sent, weights, update, len(labels), 1)


MOMENTUM = {"momentum": 0.9}


@pytest.mark.parametrize(
    ("labels", "size", "train"),
    [
        ([50, 1, 2, 3, 4, 5, 6, 7], 2, MOMENTUM),  # in the first of four steps
        ([0, 1, 2, 3, 4, 5, 6, 50], 2, MOMENTUM),  # in the last
        ([0, 1, 2, 3, 4, 5, 50, 50], 2, MOMENTUM),  # two in the last
        ([0, 1, 2, 3, 50, 5, 6, 50], 2, MOMENTUM),  # two, in different steps
        ([50, 50, 2, 3, 4, 5, 6, 7, 8], 8, {"local_epochs": 1}),  # two in the whole batch
        ([0, 1, 2, 3, 4, 5, 6, 7, 50], 8, {"local_epochs": 1}),  # one in the small batch
        ([0, 1, 2, 3, 4, 5, 6, 50], 2, {}),
        ([0, 1, 2, 3, 4, 5, 50, 50], 2, {}),
        ([0, 1, 2, 3, 4, 5, 6, 7], 2, MOMENTUM),
    ],
)
def test_over_steps_that_count_unequally_nothing_false_is_claimed(
    labels: list[int], size: int, train: dict
) -> None:
    stage, seen = steps_of(labels, size, **train)
    isolated = stage.manoeuvre.isolate(seen)
    answered = labels.count(50)
    if isolated.count is None:  # not known, and taken as one
        assert isolated.pictures == 1
        assert answered > 0
        assert "taken as one" in isolated.words
    else:
        assert isolated.pictures == answered, isolated.words


def test_steps_that_count_alike_are_counted() -> None:
    stage, seen = steps_of([0, 1, 2, 3, 4, 5, 6, 50], 2)
    assert stage.manoeuvre.isolate(seen).count == 1.0

"""Fishing: what other pictures send, what the target's gives, what the count says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedsim.attacks.labels import recover_labels
from fedsim.attacks.manoeuvres.fishing import Fishing
from fedsim.attacks.manoeuvres.reading import is_silent, without_head
from fedsim.core.errors import AttackError, SpecError
from fedsim.core.learning import local_update
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec, TrainSpec, Upload
from tests.attacks.manoeuvres.stage import (
    RESNET,
    SUMS,
    VIT,
    Stage,
    closest,
    decibels,
    pictures,
)

ALONE = torch.arange(8)


def test_pictures_of_other_classes_send_exactly_nothing() -> None:
    stage = Stage(Fishing(target=50))
    seen = stage.play(pictures(8), ALONE)
    assert is_silent(without_head(seen.update, stage.factory()).tensors)
    isolated = stage.manoeuvre.isolate(seen)
    assert isolated is not None
    assert (isolated.pictures, isolated.count) == (0, 0.0)


def test_the_target_comes_out_exactly_of_a_batch_of_64() -> None:
    stage = Stage(Fishing(target=17), train=TrainSpec(batch_size=64, mode="eval"))
    images = pictures(64)
    seen = stage.play(images, torch.arange(64))
    isolated = stage.manoeuvre.isolate(seen)
    assert isolated.pictures == 1
    assert isolated.labels.tolist() == [17]
    assert isolated.count == pytest.approx(1, abs=1e-3)
    assert decibels(stage.solved(seen, isolated), images[17]) > 60


def test_what_is_isolated_is_the_gradient_of_that_picture_alone() -> None:
    stage = Stage(Fishing(target=3))
    images = pictures(8)
    seen = stage.play(images, ALONE)
    isolated = stage.manoeuvre.isolate(seen)
    alone = local_update(seen.loaded(), [(images[3:4], ALONE[3:4])], stage.public.protocol)
    assert isolated.update.tensors.keys() == alone.tensors.keys()
    for name, tensor in isolated.update.tensors.items():
        assert torch.allclose(tensor, alone.tensors[name], rtol=1e-3, atol=1e-3), name


def test_the_labels_of_one_round_choose_the_target_of_the_next() -> None:
    stage = Stage(Fishing())
    images, labels = pictures(8), torch.tensor([9, 9, 9, 9, 9, 9, 9, 42])
    assert stage.manoeuvre.isolate(stage.play(images, labels)).pictures == 0
    assert stage.memory["0"]["labels"] == sorted(labels.tolist())
    seen = stage.play(images, labels, round_=2)
    isolated = stage.manoeuvre.isolate(seen)
    assert isolated.labels.tolist() == [42]
    assert decibels(stage.solved(seen, isolated), images[7]) > 60


def test_every_class_is_fished_for_in_turn_before_labels_are_known() -> None:
    stage = Stage(Fishing(), classes=5)
    targets = [stage.manoeuvre.tamper(stage.brief(r)).about["target"] for r in range(1, 6)]
    assert sorted(targets) == [0, 1, 2, 3, 4]
    other = stage.manoeuvre.tamper(stage.brief(1, client=1, cohort=(0, 1)))
    assert other.about["target"] != targets[0]


def test_the_same_brief_gives_the_same_weights() -> None:
    stage = Stage(Fishing(kind="feature"))
    first, second = (stage.manoeuvre.tamper(stage.brief(2)) for _ in range(2))
    assert first.about == second.about
    assert all(torch.equal(first.changed[n], second.changed[n]) for n in first.changed)
    assert sorted(first.changed) == ["head.bias", "head.weight"]


@pytest.mark.parametrize("share", [1.0, 0.6, 0.3])
def test_strength_trades_what_leaks_for_how_far_the_head_is_from_the_honest_one(
    share: float,
) -> None:
    stage = Stage(Fishing(target=3, strength=share))
    sent = stage.manoeuvre.tamper(stage.brief())
    far = float((sent.changed["head.weight"] - stage.weights["head.weight"]).norm())
    images = pictures(8)
    seen = stage.play(images, ALONE)
    leak = decibels(stage.solved(seen, stage.manoeuvre.isolate(seen)), images[3])
    assert (far > 500 and leak > 60) if share == 1 else (far < 60 and leak < 60)


@pytest.mark.parametrize("again", [True, False])
def test_the_target_survives_five_local_steps(again: bool) -> None:
    train = TrainSpec(batch_size=8, local_steps=5, lr=0.01, upload=Upload.DELTA, mode="eval")
    stage = Stage(Fishing(target=3), train=train)
    images, labels = pictures(40), torch.arange(40)
    if again:
        images, labels = images[:8].repeat(5, 1, 1, 1), labels[:8].repeat(5)
    seen = stage.play(images, labels, steps=5)
    isolated = stage.manoeuvre.isolate(seen)
    assert isolated.pictures == (5 if again else 1)
    assert ("taken again" in isolated.words) == again
    assert decibels(stage.solved(seen, isolated), images[3]) > 30


def test_a_cohorts_sum_is_one_larger_batch() -> None:
    stage = Stage(Fishing(target=21), defenses=SUMS)
    images, labels = pictures(32), torch.arange(32)
    clients = [(images[k : k + 8], labels[k : k + 8]) for k in range(0, 32, 8)]
    seen = stage.play_sum(clients)
    isolated = stage.manoeuvre.isolate(seen[0])
    assert isolated.pictures == 1
    assert "4 clients" in isolated.words
    assert decibels(stage.solved(seen[0], isolated), images[21]) > 60
    assert stage.memory["cohort"]["labels"] == list(range(32))


def test_a_resnets_target_is_alone_too() -> None:
    stage = Stage(Fishing(target=3), model=RESNET)
    images = pictures(8)
    seen = stage.play(images, ALONE)
    isolated = stage.manoeuvre.isolate(seen)
    assert isolated.pictures == 1
    alone = local_update(seen.loaded(), [(images[3:4], ALONE[3:4])], stage.public.protocol)
    name = "conv1.0.weight"
    assert torch.allclose(isolated.update.tensors[name], alone.tensors[name], rtol=1e-2, atol=1e-2)


def test_batchnorm_in_train_mode_is_said_to_mix_the_batch() -> None:
    stage = Stage(Fishing(target=3), model=RESNET, train=TrainSpec(batch_size=8))
    isolated = stage.manoeuvre.isolate(stage.play(pictures(8), ALONE))
    assert "approximate" in isolated.words


SAME = torch.full((16,), 5)
SIXTEEN = TrainSpec(batch_size=16, mode="eval")


def test_a_gate_leaves_one_picture_of_one_class_by_the_servers_own_pictures() -> None:
    images = pictures(112)
    stage = Stage(
        Fishing(kind="feature", target=5, threshold="surrogate"),
        train=SIXTEEN,
        surrogate=images[48:],
    )
    claimed = []
    for round_ in range(1, 7):
        batch = images[torch.arange(16) + 5 * round_]
        seen = stage.play(batch, SAME, round_=round_)
        isolated = stage.manoeuvre.isolate(seen)
        if isolated.pictures == 1:
            claimed.append(closest(stage.solved(seen, isolated), batch))
            assert isolated.count < 1.1
        else:
            assert "mixed" in isolated.words
    assert len(claimed) >= 2
    assert min(claimed) > 25


def test_bisection_isolates_one_where_a_client_keeps_its_batch() -> None:
    stage = Stage(Fishing(kind="feature", target=5), train=SIXTEEN)
    images = pictures(16)
    best = []
    for round_ in range(1, 6):
        seen = stage.play(images, SAME, round_=round_)
        isolated = stage.manoeuvre.isolate(seen)
        if isolated.pictures == 1:
            best.append(closest(stage.solved(seen, isolated), images))
            assert "interval" not in stage.memory["0"]
    assert max(best) > 40


def test_a_steep_gate_bisects_behind_weight_deltas() -> None:
    train = TrainSpec(batch_size=16, mode="eval", upload=Upload.DELTA, lr=0.05)
    stage = Stage(Fishing(kind="feature", target=5), train=train)
    images = pictures(16)
    best = 0.0
    for round_ in range(1, 9):
        seen = stage.play(images, SAME, round_=round_)
        isolated = stage.manoeuvre.isolate(seen)
        if isolated.pictures == 1:
            best = max(best, closest(stage.solved(seen, isolated), images))
    assert best > 40


def test_auto_takes_a_gate_once_all_labels_are_known_to_be_the_same() -> None:
    stage = Stage(Fishing(), train=SIXTEEN)
    assert "gate" not in stage.play(pictures(16), SAME, round_=1).about
    seen = stage.play(pictures(16), SAME, round_=2)
    assert "gate" in seen.about
    assert stage.memory["0"]["labels"] == SAME.tolist()


def test_surrogate_needs_pictures_of_the_servers_own() -> None:
    stage = Stage(Fishing(kind="feature", threshold="surrogate"))
    with pytest.raises(AttackError, match="threat G"):
        stage.manoeuvre.tamper(stage.brief())


# -- refusals -----------------------------------------------------------------------------------


def test_a_target_outside_the_classes_is_refused() -> None:
    stage = Stage(Fishing(target=100))
    with pytest.raises(SpecError, match="0 to 99"):
        stage.manoeuvre.check_model(stage.factory(), stage.public)


def test_a_head_without_a_bias_is_refused() -> None:
    stage = Stage(Fishing())
    model = stage.factory()
    model.head.bias = None
    with pytest.raises(SpecError, match="bias"):
        stage.manoeuvre.check_model(model, stage.public)


def test_a_model_without_a_linear_head_is_refused() -> None:
    with pytest.raises(SpecError, match="linear head"):
        Fishing().check_model(torch.nn.Conv2d(3, 8, 3), Stage(Fishing()).public)


def test_one_class_is_refused() -> None:
    model = build_model(VIT, image_size=32, num_classes=1, seed=0)
    public = replace(Stage(Fishing()).public, num_classes=1)
    with pytest.raises(SpecError, match="two classes"):
        Fishing().check_model(model, public)


def test_two_heads_are_refused() -> None:
    spec = ModelSpec(name="deit_tiny_distilled_patch16_224", options={"patch_size": 8, "depth": 1})
    model = build_model(spec, image_size=32, num_classes=100, seed=0)
    with pytest.raises(SpecError, match="one head"):
        Fishing().check_model(model, Stage(Fishing()).public)


def test_labels_are_read_as_by_the_rule_for_labels() -> None:
    stage = Stage(Fishing(target=3))
    seen = stage.play(pictures(8), ALONE)
    assert stage.memory["0"]["labels"] == recover_labels(seen.update, seen.loaded(), 8).tolist()


@pytest.mark.parametrize("strength", [0.2, 0.1, 0.05, 0.01])
@pytest.mark.parametrize("labels", [[3, 1, 2, 0, 4, 5, 6, 7], [3, 3, 2, 0, 4, 5, 6, 7]])
def test_a_head_that_is_too_gentle_is_read_as_it_came(strength: float, labels: list[int]) -> None:
    stage = Stage(Fishing(target=3, strength=strength))
    seen = stage.play(pictures(8), torch.tensor(labels))
    isolated = stage.manoeuvre.isolate(seen)
    assert isolated.pictures == 8
    assert "too gentle" in isolated.words
    assert isolated.update.tensors.keys() == seen.update.tensors.keys()


def test_a_gentle_head_hides_no_lone_picture() -> None:
    stage = Stage(Fishing(target=3, strength=0.1), train=TrainSpec(batch_size=1, mode="eval"))
    images = pictures(1)
    for label in (3, 4):
        seen = stage.play(images, torch.tensor([label]))
        isolated = stage.manoeuvre.isolate(seen)
        assert isolated.pictures == 1
        assert decibels(stage.solved(seen, isolated), images[0]) > 60


def test_half_of_its_strength_still_isolates() -> None:
    stage = Stage(Fishing(target=3, strength=0.5))
    images = pictures(8)
    seen = stage.play(images, ALONE)
    isolated = stage.manoeuvre.isolate(seen)
    assert isolated.pictures == 1
    assert decibels(stage.solved(seen, isolated), images[3]) > 20

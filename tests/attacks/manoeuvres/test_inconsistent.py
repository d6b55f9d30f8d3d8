"""Inconsistent weights: who is silent, whose the sum is, and what a lure makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedsim.attacks.manoeuvres.inconsistent import Inconsistent
from fedsim.attacks.manoeuvres.reading import is_silent, without_head
from fedsim.core.errors import SpecError
from fedsim.core.learning import local_update
from fedsim.core.spec import ModelSpec, TrainSpec, Upload
from tests.attacks.manoeuvres.stage import RESNET, SUMS, VIT, Stage, decibels, pictures

IMAGES, LABELS = pictures(32), torch.arange(32)
COHORT = [(IMAGES[k : k + 8], LABELS[k : k + 8]) for k in range(0, 32, 8)]


def test_clients_other_than_the_victim_send_exactly_nothing_but_their_head() -> None:
    stage = Stage(Inconsistent(victim=1))
    sent = stage.manoeuvre.tamper(stage.brief(client=0, cohort=(0, 1)))
    seen = stage.sighting(
        sent, stage.received(sent), stage.answer(stage.received(sent), COHORT[:1]), 8, 1
    )
    assert is_silent(without_head(seen.update, stage.factory()).tensors)
    isolated = stage.manoeuvre.isolate(seen)
    assert isolated is not None
    assert isolated.pictures == 0
    assert "client 1" in isolated.words


def test_the_victim_of_a_sum_stands_alone_with_honest_weights() -> None:
    stage = Stage(Inconsistent(victim=2), defenses=SUMS)
    seen = stage.play_sum(COHORT)
    isolated = stage.manoeuvre.isolate(seen[0])
    assert isolated.pictures == 8
    model = stage.factory()
    model.load_state_dict(stage.weights)
    alone = local_update(model, [COHORT[2]], stage.public.protocol)
    for name, tensor in isolated.update.tensors.items():
        assert torch.allclose(tensor, alone.tensors[name], atol=1e-6)
    assert "head.weight" not in isolated.update.tensors


@pytest.mark.parametrize("reader", [0, 2])
def test_a_lure_gives_one_picture_of_the_victim_through_the_sum(reader: int) -> None:
    lure = {"name": "fishing", "target": 19}
    stage = Stage(Inconsistent(victim=2, lure=lure), defenses=SUMS)
    seen = stage.play_sum(COHORT)[reader]
    isolated = stage.manoeuvre.isolate(seen)
    assert isolated.pictures == 1
    assert isolated.labels.tolist() == [19]
    assert "client 2 alone" in isolated.words
    assert decibels(stage.solved(seen, isolated), IMAGES[19]) > 60


@pytest.mark.parametrize("repeated", [1, 4])
def test_deltas_of_a_cohort_are_counted_as_gradients_are(repeated: int) -> None:
    labels = LABELS.clone()
    labels[16 : 16 + repeated] = 50  # of client 2
    cohort = [(IMAGES[k : k + 8], labels[k : k + 8]) for k in range(0, 32, 8)]
    train = TrainSpec(batch_size=8, mode="eval", upload=Upload.DELTA, lr=0.01)
    lure = {"name": "fishing", "target": 50}
    stage = Stage(Inconsistent(victim=2, lure=lure), defenses=SUMS, train=train)
    seen = stage.play_sum(cohort)[2]
    isolated = stage.manoeuvre.isolate(seen)
    assert isolated.pictures == repeated
    if repeated == 1:
        assert decibels(stage.solved(seen, isolated), IMAGES[16]) > 60


def test_a_model_that_learns_past_its_head_is_refused() -> None:
    model = ModelSpec(
        name="deit_tiny_distilled_patch16_224",
        options={"patch_size": 8, "depth": 2, "embed_dim": 96, "num_heads": 3},
    )
    stage = Stage(Inconsistent(victim=0), model=model, defenses=SUMS)
    with pytest.raises(SpecError, match="learns past it"):
        stage.manoeuvre.check_model(stage.factory(), stage.public)
    for honest in (VIT, RESNET):
        plain = Stage(Inconsistent(victim=0), model=honest)
        plain.manoeuvre.check_model(plain.factory(), plain.public)


def test_the_class_of_another_client_is_not_taken_for_the_victims() -> None:
    stage = Stage(Inconsistent(victim=2, lure={"name": "fishing", "target": 3}), defenses=SUMS)
    isolated = stage.manoeuvre.isolate(stage.play_sum(COHORT)[0])
    assert isolated.pictures == 0


def test_a_victim_that_stayed_away_leaves_nothing() -> None:
    stage = Stage(Inconsistent(victim=2), defenses=SUMS)
    seen = stage.play_sum(COHORT)[0]
    others = tuple(client for client in range(len(COHORT)) if client != 2)
    isolated = stage.manoeuvre.isolate(replace(seen, stayed=others))
    assert isolated.pictures == 0
    assert "stayed away" in isolated.words


def test_a_victim_that_is_not_asked_leaves_the_round_honest() -> None:
    stage = Stage(Inconsistent(victim=9), defenses=SUMS)
    sent = stage.manoeuvre.tamper(stage.brief(1, client=0, cohort=(0, 1)))
    assert (sent.changed, sent.about) == ({}, {})
    assert "not asked in this round" in sent.words
    assert stage.manoeuvre.isolate(stage.play_sum(COHORT)[0]) is None


def test_victims_are_taken_in_turn() -> None:
    stage = Stage(Inconsistent())
    briefs = [stage.brief(round_, client=4, cohort=(2, 4, 7)) for round_ in range(1, 5)]
    victims = [stage.manoeuvre.tamper(brief).about["victim"] for brief in briefs]
    assert victims == [2, 4, 7, 2]
    assert not stage.manoeuvre.tamper(briefs[1]).changed


def test_a_lure_learns_from_its_victim_alone() -> None:
    stage = Stage(Inconsistent(victim=0, lure={"name": "fishing"}))
    stage.play(IMAGES[:8], torch.tensor([9, 9, 9, 9, 9, 9, 9, 42]))
    assert stage.manoeuvre.tamper(stage.brief(2)).about["lure"]["target"] == 42
    other = Stage(Inconsistent(victim=1, lure={"name": "fishing"}))
    other.play(IMAGES[:8], LABELS[:8])
    assert other.memory == {}


def test_what_a_lure_uses_and_refuses_is_its_own() -> None:
    lured = Inconsistent(lure={"name": "fishing", "target": 500})
    assert lured.uses == {"surrogate"}
    assert lured.needs == {"tampering"}
    assert Inconsistent().uses == frozenset()
    stage = Stage(lured)
    with pytest.raises(SpecError, match="target is 500"):
        lured.check_model(stage.factory(), stage.public)


@pytest.mark.parametrize(
    ("lure", "words"),
    [
        ({}, "needs a name"),
        ({"name": "inconsistent"}, "another"),
        ({"name": "fisching"}, "fishing"),
    ],
)
def test_a_wrong_lure_is_refused(lure: dict, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Inconsistent(lure=lure)

"""Matching attacks: from a view to what is matched, by which client, with which labels."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks import create_attack
from fedsim.core.attack import no_progress
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import Announced, Secrets, View, granted_by
from fedsim.core.learning import local_update
from fedsim.core.metrics import psnr
from fedsim.core.models import build_model
from fedsim.core.observation import Observation, Public
from fedsim.core.spec import DataSpec, Spec, ThreatSpec, TrainSpec
from tests.staging import (
    CPU,
    TINY,
    attack,
    convnet,
    convnet_observation,
    observe,
    photos,
    several_steps,
)


def test_a_closed_form_is_a_start_for_matching() -> None:
    images, labels = photos(32, [70])
    observation = observe(TINY, images, labels)
    result = attack(observation, "inverting_gradients", init="patch_solve", steps=2, lr=1e-6)
    assert float(psnr(images, result.images)) > 60
    del observation.update.tensors["pos_embed"]
    result = attack(observation, "inverting_gradients", init="patch_solve", steps=2)
    assert any("no closed form to start from" in note for note in result.notes)


def test_only_the_selected_layers_are_matched() -> None:
    images, labels = photos(32, [5])
    observation = observe(TINY, images, labels)
    whole = attack(observation, "inverting_gradients", steps=2)
    part = attack(observation, "inverting_gradients", steps=2, parts=["attention"], blocks=[2, 2])
    assert whole.loss != part.loss
    with pytest.raises(AttackError, match="selection"):
        attack(observation, "inverting_gradients", steps=2, blocks=[7, 9])


def test_an_update_with_missing_layers_is_matched_by_the_rest() -> None:
    observation, images = convnet_observation()
    for name in ("0.weight", "0.bias"):
        del observation.update.tensors[name]
    found = attack(observation, "inverting_gradients", convnet, steps=150, tv=1e-3)
    guess = attack(observation, "prior_only", convnet)
    assert float(psnr(images, found.images)) > float(psnr(images, guess.images)) + 2


def test_matching_declines_an_update_that_is_not_finite() -> None:
    observation, _ = convnet_observation()
    observation.update.tensors["0.weight"][0] = float("nan")
    with pytest.raises(AttackError, match="finite"):
        attack(observation, "inverting_gradients", convnet, steps=2)


def test_matching_declines_layers_the_model_does_not_have() -> None:
    observation, _ = convnet_observation()
    observation.update.tensors["strange.weight"] = torch.ones(2)
    with pytest.raises(AttackError, match="strange"):
        attack(observation, "inverting_gradients", convnet, steps=2)


def test_the_batch_size_is_read_from_the_rank_where_it_is_withheld() -> None:
    images, labels = photos(32, [1, 100, 200])
    observation = observe(TINY, images, labels)
    granted = granted_by(ThreatSpec(model="B", withhold=["batch_size"]))
    view = View(
        observation,
        granted,
        Announced(lambda: build_model(TINY, image_size=32, num_classes=8, seed=0)),
    )
    attack_ = create_attack("inverting_gradients", steps=2)
    result = attack_.reconstruct(view, device=CPU, progress=no_progress)
    assert len(result.images) == 3
    assert "batch_size" not in view.ledger
    assert any("batch size 3" in note for note in result.notes)


def test_a_client_that_clips_its_gradient_is_simulated_with_its_clipping() -> None:
    images, labels = photos(16, [70])
    train = TrainSpec(clip=0.01)
    public = Public.of(Spec(data=DataSpec(image_size=16), train=train), num_classes=8)
    update = local_update(convnet(), [(images, labels)], public.protocol)
    observation = Observation(1, 0, convnet().state_dict(), update, public)
    told = attack(observation, "idlg", convnet, threat="C", steps=60)
    untold = attack(observation, "idlg", convnet, threat="B", steps=60)
    assert float(psnr(images, told.images)) > float(psnr(images, untold.images)) + 3


def test_oracle_labels_say_how_many_pictures_there_were() -> None:
    observation, _ = several_steps()
    granted = granted_by(ThreatSpec(model="C", oracle_labels=True))
    view = View(observation, granted, Announced(convnet), secrets=Secrets(torch.tensor([1])))
    result = create_attack("inverting_gradients", steps=2).reconstruct(
        view, device=CPU, progress=no_progress
    )
    assert len(result.images) == 1


def test_auto_unrolls_what_it_knows_and_says_what_it_does_not() -> None:
    observation, _ = several_steps()
    told = attack(observation, "inverting_gradients", convnet, threat="C", steps=2)
    assert len(told.images) == 4  # four steps of one picture each
    untold = attack(observation, "inverting_gradients", convnet, threat="B", steps=2)
    assert any("as if it were one gradient step" in note for note in untold.notes)


def test_the_size_of_a_gradient_cannot_be_guessed_from_a_delta() -> None:
    observation, _ = several_steps()
    with pytest.raises(AttackError, match="cosine"):
        attack(observation, "dlg", convnet, threat="B", steps=2)

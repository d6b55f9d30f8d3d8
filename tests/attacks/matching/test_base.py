"""Matching attacks: from a view to what is matched, by which client, with which labels."""

from __future__ import annotations

import dataclasses

import pytest

from fedsim.attacks import create_attack
from fedsim.attacks.matching.base import SHARED_PARAMETERS, MatchingAttack
from fedsim.core.attack import no_progress
from fedsim.core.errors import AttackError, SpecError
from fedsim.core.knowledge import THREATS, Announced, View, granted_by
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


def test_matching_declines_an_update_that_is_not_finite() -> None:
    observation, _ = convnet_observation()
    observation.update.tensors["0.weight"][0] = float("nan")
    with pytest.raises(AttackError, match="finite"):
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


def test_auto_unrolls_what_it_knows_and_says_what_it_does_not() -> None:
    observation, _ = several_steps()
    told = attack(observation, "inverting_gradients", convnet, threat="C", steps=2)
    assert len(told.images) == 4  # four steps of one picture each
    untold = attack(observation, "inverting_gradients", convnet, threat="B", steps=2)
    assert any("as if it were one gradient step" in note for note in untold.notes)


def test_a_spec_names_the_parameters_of_every_group_flat() -> None:
    given = {"steps": 400, "seeds": 4, "init": "grey", "labels": "min", "local": "single"}
    made = create_attack("gradvit", engine="double", blocks=[1, 2], **given)
    assert {name: getattr(made, name) for name in given} == given
    assert made.budget().steps == 400
    with pytest.raises(SpecError, match=r"did you mean 'seeds'\?.*it takes: steps, .*engine.*init"):
        create_attack("gradvit", seedz=4)


def test_a_search_under_way_is_known_by_words_that_no_regrouping_changes() -> None:
    observation, _ = convnet_observation()
    view = View(observation, THREATS["B"].grants, Announced(convnet))
    words = create_attack("tag", steps=7).task(view, CPU).fingerprint
    shared = [field.name for field in dataclasses.fields(MatchingAttack)]
    assert set(shared) == set(SHARED_PARAMETERS)
    assert words.startswith(
        "TagAttack(steps=7, lr=0.1, seeds=1, optimizer=None, schedule=None, warmup=0, "
        "langevin=None, engine='auto', "
    )
    assert words.count("=") == len(dataclasses.fields(create_attack("tag")))

"""SameModel: a cohort whose models differ notices, where its clients can talk."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedsim.core.guard import Scene
from fedsim.core.learning import Protocol
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec
from fedsim.defenses.guards.same_model import SameModel, notice_of
from tests.defenses.guards.conftest import scene_of


def test_a_cohort_that_received_the_same_is_silent(vit) -> None:
    scene = scene_of(vit)
    said = notice_of(scene)
    finding = SameModel().inspect(replace(scene, notices={0: "own", 1: said, 2: said}))
    assert finding.score == 0
    assert not finding.fired


def test_one_client_with_other_weights_is_noticed_by_all_and_notices_all(vit) -> None:
    scene = scene_of(vit)
    honest = notice_of(scene)
    with torch.no_grad():
        vit.head.bias[0] += 1e-6
    finding = SameModel().inspect(replace(scene, notices={1: honest, 2: honest}))
    assert finding.fired
    assert finding.score == 2
    assert "1, 2" in finding.words
    other = notice_of(scene)
    assert other != honest
    finding = SameModel().inspect(replace(scene, notices={1: honest, 2: other}))
    assert finding.score == 1


def test_where_clients_cannot_talk_it_says_so_and_does_not_fire(vit) -> None:
    finding = SameModel().inspect(scene_of(vit))
    assert not finding.fired
    assert "cannot talk" in finding.words
    assert not SameModel().inspect(replace(scene_of(vit), notices={})).fired


def test_statistics_that_clients_keep_for_themselves_are_not_compared() -> None:
    spec = ModelSpec(name="resnet10t")
    model = build_model(spec, image_size=32, num_classes=5, seed=0)
    shared, local = Protocol(), Protocol(batchnorm="local")

    def notices() -> tuple[str, str]:
        batches = [(torch.rand(2, 3, 32, 32), torch.tensor([0, 1]))]
        return tuple(notice_of(Scene(1, 0, model, batches, p)) for p in (shared, local))

    before = notices()
    model.get_buffer("bn1.running_mean").add_(1)
    after = notices()
    assert before[0] != after[0]
    assert before[1] == after[1]

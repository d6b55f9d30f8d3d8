"""LossJump: confidently wrong models are noticed, fresh and honestly worse ones are not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec
from fedsim.defenses.guards.loss_jump import LossJump, loss_of
from tests.defenses.guards.conftest import fish, scene_of


def test_the_loss_is_that_of_the_first_batch(vit) -> None:
    scene = scene_of(vit)
    images, labels = scene.batches[0]
    with torch.no_grad():
        expected = F.cross_entropy(vit(scene.protocol.normalise(images)), labels)
    assert loss_of(scene) == (pytest.approx(float(expected), rel=1e-6), 5)


@pytest.mark.parametrize("count", [1, 4, 16])
def test_a_fresh_model_is_about_as_good_as_guessing(vit, count: int) -> None:
    finding = LossJump().inspect(scene_of(vit, count))
    assert not finding.fired
    assert "guessing" in finding.words


def test_a_fished_batch_is_far_worse_than_guessing(vit) -> None:
    fish(vit, target=2)
    assert LossJump().inspect(scene_of(vit, 5)).fired


def test_a_rise_is_measured_from_what_was_kept(vit) -> None:
    guard = LossJump(jump=2)
    scene = scene_of(vit, 4, round_=2)
    kept = guard.keep(scene)
    assert not guard.inspect(replace(scene, kept=kept)).fired
    with torch.no_grad():
        vit.head.bias[0] -= 30  # one label in five is now far off
    worse = replace(scene, kept=kept)
    loss, before = loss_of(worse)[0], float(kept["loss_jump/last"])
    allowed = 2 * math.log(5)
    finding = guard.inspect(worse)
    assert finding.score == pytest.approx((loss - before) / allowed, rel=1e-5)
    assert finding.fired


def test_a_loss_that_is_no_number_fires(vit) -> None:
    with torch.no_grad():
        vit.head.bias[0] = math.nan
    assert LossJump().inspect(scene_of(vit)).fired


def test_the_model_and_the_coin_are_left_as_they_were() -> None:
    model = build_model(ModelSpec(name="resnet10t"), image_size=32, num_classes=5, seed=0).train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    coin = torch.get_rng_state()
    guard = LossJump()
    guard.inspect(scene_of(model))
    assert guard.keep(scene_of(model)).keys() == {"loss_jump/last"}
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(coin, torch.get_rng_state())

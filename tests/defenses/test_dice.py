"""Dice: the client's coin, in its own model alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedsim.core.errors import ModelError
from fedsim.core.models import build_model
from fedsim.core.spec import TrainSpec
from fedsim.defenses import create_defense
from fedsim.defenses.applied import prepared
from fedsim.defenses.dice import After, Before, Dice, head_of
from tests.defenses.conftest import VIT, secret


def test_a_copy_has_no_coin_and_keeps_what_was_read() -> None:
    dice = Dice(rng=secret(), read=torch.ones(2), proof=(torch.ones(1), torch.zeros(1)))
    twin = copy.deepcopy(dice)
    assert twin.rng is None
    assert twin.proof is None
    assert twin.read is not None


def test_the_first_draw_of_a_step_is_proven_once() -> None:
    dice = Dice()
    dice.note(torch.ones(1), torch.zeros(1))  # nobody asked
    assert dice.proven() is None
    dice.take(secret())
    dice.note(torch.ones(1), torch.zeros(1))
    dice.note(torch.ones(1), torch.ones(1))
    assert dice.proven() == ({"features": torch.ones(1)}, {"features": torch.zeros(1)})
    assert dice.proven() is None


def test_hooks_follow_the_copies_of_their_model() -> None:
    layer = nn.Linear(2, 2)
    scale = nn.Linear(2, 2)
    layer.add_module("scale", scale)
    layer.register_forward_pre_hook(Before(scale))
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.scale.weight.zero_()
        twin.scale.bias.zero_()
    assert torch.equal(twin(torch.ones(1, 2)), layer.bias[None])
    assert not torch.equal(layer(torch.ones(1, 2)), layer.bias[None])


def test_a_layer_that_gives_several_things_has_the_first_changed() -> None:
    x = torch.ones(1)
    assert After(lambda t: 2 * t)(nn.Identity(), (x,), (x, "more")) == (2 * x, "more")
    with pytest.raises(ModelError, match="not called with what it reads"):
        Before(lambda t: t)(nn.Identity(), ())


@pytest.mark.parametrize("name", ["dropout", "precode"])
def test_an_adapter_on_the_head_would_read_past_them(name: str) -> None:
    net = build_model(VIT, image_size=32, num_classes=5, seed=0)
    train = TrainSpec(trainable="lora", lora={"targets": ["head"]})
    with pytest.raises(ModelError, match=r"leave the head out of train\.lora\.targets"):
        prepared(net, [create_defense(name)], train)


def test_the_head_is_the_layer_that_gives_the_logits() -> None:
    assert head_of(build_model(VIT, image_size=32, num_classes=5, seed=0), "x").out_features == 5

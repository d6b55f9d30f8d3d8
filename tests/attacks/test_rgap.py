"""R-GAP: a plain chain is inverted layer by layer."""

from __future__ import annotations

import pytest
from torch import nn

from fedsim.attacks import create_attack
from fedsim.core.attack import Reconstruction, no_progress
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import THREATS, Announced, Assets, View
from fedsim.core.metrics import psnr
from fedsim.core.models import build_architecture, build_model
from fedsim.core.spec import ModelSpec
from tests.attacks.conftest import Basis
from tests.staging import CPU, TINY, attack, observe, observe_net, photos


@pytest.mark.parametrize("activation", ["leaky_relu", "tanh"])
def test_rgap_inverts_a_convolutional_network_layer_by_layer(activation: str) -> None:
    options = {"channels": [12, 16], "strides": [1, 2], "activation": activation}
    spec = ModelSpec(name="convnet", options=options)
    images, labels = photos(8, [70])
    result = attack(observe(spec, images, labels), "rgap")
    assert float(psnr(images, result.images)) > 40


def test_rgap_finds_the_features_without_a_head_bias() -> None:
    options = {"channels": [12], "strides": [1], "activation": "leaky_relu", "head_bias": False}
    spec = ModelSpec(name="convnet", options=options)
    images, labels = photos(8, [70])
    result = attack(observe(spec, images, labels), "rgap")
    assert float(psnr(images, result.images)) > 40


def test_rgap_says_when_a_layer_loses_information() -> None:
    spec = ModelSpec(name="convnet", options={"channels": [2], "strides": [4]})
    images, labels = photos(16, [70])
    result = attack(observe(spec, images, labels), "rgap")
    assert any("underdetermined: rank" in note for note in result.notes)


def test_rgap_declines_what_is_no_plain_chain() -> None:
    images, labels = photos(32, [70])
    with pytest.raises(AttackError, match="plain chains"):
        attack(observe(TINY, images, labels), "rgap")


def test_rgap_fills_a_layer_that_loses_information_from_a_generator() -> None:
    spec = ModelSpec(name="convnet", options={"channels": [4, 6], "activation": "leaky_relu"})
    images, labels = photos(16, [70])
    net = build_model(spec, image_size=16, num_classes=8, seed=0)
    observation = observe_net(net, spec, images, labels)

    def factory() -> nn.Module:
        return build_architecture(spec, image_size=16, num_classes=8)

    def run(**params) -> Reconstruction:
        view = View(
            observation, THREATS["D"].grants, Announced(factory), assets=Assets(generator=Basis)
        )
        return create_attack("rgap", **params).reconstruct(view, device=CPU, progress=no_progress)

    plain, filled = run(), run(generator="underdetermined", steps=200)
    assert any(note.startswith("underdetermined") for note in plain.notes)
    assert any("from the generator" in note for note in filled.notes)
    assert float(psnr(images, filled.images)) > float(psnr(images, plain.images)) + 3
    assert "generator" in create_attack("rgap", generator="all").needs


def test_rgap_declines_a_chain_whose_forward_does_more() -> None:
    images, labels = photos(8, [70])
    with pytest.raises(AttackError, match="its forward does more"):
        attack(observe(ModelSpec(name="tests.tutorials:Chain"), images, labels), "rgap")

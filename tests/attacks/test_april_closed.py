"""APRIL's closed form: exact on the architecture it is made for, declined on others."""

from __future__ import annotations

import pytest

from fedsim.core.errors import AttackError
from fedsim.core.metrics import psnr
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec
from tests.staging import TINY, attack, observe, observe_net, photos

PLAIN = ModelSpec(options={"patch_size": 4, "depth": 2, "plain_first_block": True})


def test_april_closed_is_exact_on_architecture_a_in_float64() -> None:
    images, labels = photos(32, [70])
    net = build_model(PLAIN, image_size=32, num_classes=8, seed=0).double()
    result = attack(observe_net(net, PLAIN, images.double(), labels), "april_closed")
    assert float(psnr(images, result.images)) > 80


def test_april_closed_declines_any_other_first_block() -> None:
    images, labels = photos(32, [70])
    with pytest.raises(AttackError, match="plain_first_block"):
        attack(observe(TINY, images, labels), "april_closed")


def test_april_closed_says_what_the_pseudo_inverse_loses() -> None:
    spec = ModelSpec(
        options={"patch_size": 16, "depth": 2, "embed_dim": 96, "plain_first_block": True}
    )
    images, labels = photos(64, [70])
    result = attack(observe(spec, images, labels), "april_closed")
    assert any("96 channels for 768 pixels" in note for note in result.notes)

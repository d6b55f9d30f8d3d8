"""D-SNR: the formula by hand, a fished batch far above an honest one, a model left as it was."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedsim.core.guard import Scene
from fedsim.core.learning import Protocol
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec
from fedsim.defenses.guards.d_snr import DSnr, d_snr, gradient_norms
from tests.defenses.guards.conftest import fish, scene_of


def by_hand(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, name: str):
    weight = model.get_submodule(name).weight
    norms = []
    for image, label in zip(images, labels, strict=True):
        loss = F.cross_entropy(model(image[None]), label[None])
        norms.append(float(torch.autograd.grad(loss, weight)[0].norm()))
    return norms


def test_d_snr_is_its_formula_on_a_tiny_network() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3)).eval()
    images, labels = torch.rand(3, 3, 2, 2), torch.tensor([0, 1, 1])
    plain = Protocol(mean=(0, 0, 0), std=(1, 1, 1))
    expected = 0.0
    for name in ("1", "3"):
        norms = by_hand(model, images, labels, name)
        expected = max(expected, *(n / (sum(norms) - n) for n in norms))
    finding = DSnr(plain=True).inspect(Scene(1, 0, model, [(images, labels)], plain))
    assert finding.score == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["vit", "resnet10t", "efficientnet_lite0", "convnet"])
def test_norms_are_those_of_each_pictures_own_gradient(name: str, vit) -> None:
    model = vit
    if name != "vit":
        model = build_model(ModelSpec(name=name), image_size=32, num_classes=5, seed=0)
    model.eval()
    images, labels = torch.rand(3, 3, 32, 32), torch.tensor([0, 3, 3])
    norms, _ = gradient_norms(model, images, labels)
    assert len(norms) >= 5
    for layer in [*norms][:: max(1, len(norms) // 4)]:
        assert norms[layer].tolist() == pytest.approx(
            by_hand(model, images, labels, layer), rel=1e-3, abs=1e-9
        )


def test_a_layer_that_is_used_twice_has_one_gradient() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(12, 12), nn.Linear(12, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(self.layer(images.flatten(1)).tanh()))

    torch.manual_seed(0)
    model = Twice()
    images, labels = torch.rand(2, 3, 2, 2), torch.tensor([0, 1])
    norms = gradient_norms(model, images, labels)[0]["layer"].tolist()
    assert norms == pytest.approx(by_hand(model, images, labels, "layer"), rel=1e-5)


def test_more_pictures_than_are_held_at_once_give_the_same(vit) -> None:
    images, labels = torch.rand(20, 3, 32, 32), torch.arange(20) % 5
    whole, _ = gradient_norms(vit, images, labels)
    part, _ = gradient_norms(vit, images[17:], labels[17:])
    for name, norms in part.items():
        assert torch.allclose(whole[name][17:], norms, rtol=1e-3)


def test_a_fished_picture_is_noticed_and_an_honest_batch_is_not(vit) -> None:
    honest = DSnr().inspect(scene_of(vit, 5))
    assert not honest.fired
    fish(vit, target=2)
    finding = DSnr().inspect(scene_of(vit, 5))  # one picture of each label
    assert finding.fired
    assert finding.score > 1e4


def test_a_picture_that_is_fished_in_a_later_batch_is_noticed(vit) -> None:
    fish(vit, target=2)
    (batch,) = scene_of(vit, 5).batches
    without = tuple(part[[0, 1, 3, 4]] for part in batch)
    scene = replace(scene_of(vit, 5), batches=[without, batch])
    assert DSnr().inspect(scene).fired


def test_a_batch_of_which_nothing_reaches_the_model_is_a_sign(vit) -> None:
    fish(vit, target=4)  # nobody has it
    finding = DSnr().inspect(scene_of(vit, 4))
    assert finding.fired
    assert "none of 4 pictures reaches the model" in finding.words
    nn.init.zeros_(vit.head.weight)  # as some models begin: another guard's affair
    assert not DSnr().inspect(scene_of(vit, 4)).fired


def test_pictures_known_by_heart_are_no_sign_but_stand_in_the_plain_number() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval()
    images, labels = torch.rand(3, 3, 2, 2), torch.tensor([0, 0, 1])
    with torch.no_grad():
        model[1].bias.copy_(torch.tensor([30.0, 0.0, 0.0]))  # certain of label 0
    scene = Scene(1, 0, model, [(images, labels)], Protocol())
    assert DSnr(plain=True).inspect(scene).score > 1e7
    finding = DSnr().inspect(scene)
    assert finding.score == 0
    assert "2 known by heart" in finding.words


def test_residuals_tell_certain_pictures_apart() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval()
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.tensor([40.0, 0.0, 0.0]))
    _, residuals = gradient_norms(model, torch.rand(2, 3, 2, 2), torch.tensor([0, 1]))
    small = math.exp(-40)
    assert residuals.tolist() == pytest.approx([small * 6**0.5, 2**0.5], rel=1e-4)


def test_a_batch_of_one_has_nobody_to_be_isolated_from(vit) -> None:
    fish(vit, target=0)
    finding = DSnr().inspect(scene_of(vit, 1))
    assert finding.score == 0
    assert not finding.fired
    assert "no others" in finding.words


def test_layers_without_any_gradient_show_nobody_and_a_lonely_one_shows_all() -> None:
    assert d_snr(torch.zeros(4)) == 0
    assert d_snr(torch.tensor([0.0, 2.0, 0.0])) == math.inf
    assert d_snr(torch.tensor([1.0, 1e-12, 1e-12])) == pytest.approx(5e11)


def test_a_gradient_that_is_no_number_fires(vit) -> None:
    with torch.no_grad():
        vit.head.weight[0, 0] = math.nan
    assert DSnr().inspect(scene_of(vit)).fired


def test_the_model_is_left_as_it_was_and_batchnorm_is_told() -> None:
    model = build_model(ModelSpec(name="resnet10t"), image_size=32, num_classes=5, seed=0).train()
    model.layer1.eval()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    finding = DSnr().inspect(scene_of(model))
    assert "running statistics" in finding.words
    assert model.training
    assert not model.layer1.training
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())

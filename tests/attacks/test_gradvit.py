"""GradViT: the presets of the paper, and its prior network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedsim.attacks import create_attack
from fedsim.attacks.matching import PriorNetwork
from fedsim.core.attack import no_progress
from fedsim.core.knowledge import THREATS, Announced, Assets, PriorModel, View
from fedsim.core.models import build_model
from fedsim.core.natural import natural_pictures
from fedsim.core.spec import ModelSpec
from tests.attacks.conftest import assert_recovered_through_attention
from tests.staging import CPU, TINY, attack, observe, photos


def test_gradvit_uses_the_prior_network_in_its_second_phase_only() -> None:
    images, labels = photos(32, [5])
    observation = observe(TINY, images, labels)
    asked = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            asked.append(len(x))
            return self.layers(x)

    half = (0.5, 0.5, 0.5)
    view = View(
        observation,
        THREATS["D"].grants,
        Announced(lambda: build_model(TINY, image_size=32, num_classes=8, seed=0)),
        assets=Assets(prior=lambda: PriorModel("watched", Watched(), half, half)),
    )
    gradvit = create_attack("gradvit", preset="cpu", steps=10, seeds=1)
    gradvit.reconstruct(view, device=CPU, progress=no_progress)
    natural = -(-len(natural_pictures(32)) // 1)  # by which its layers are scaled, one by one
    assert len(asked) - natural == 5 + 1  # of ten steps, and the last picture
    assert "priors" in view.ledger


def test_gradvit_says_when_it_has_no_prior_network() -> None:
    images, labels = photos(32, [5])
    result = attack(observe(TINY, images, labels), "gradvit", preset="cpu", steps=2, seeds=1)
    assert any("no image prior" in note for note in result.notes)


def test_gradvit_recovers_an_image() -> None:
    options = {"preset": "cpu", "cost": "l2", "seeds": 1, "tv": 0.0, "patch": 1e-5}
    assert_recovered_through_attention("gradvit", **options)


def test_the_preset_is_that_of_the_paper() -> None:
    gradvit = create_attack("gradvit", preset="paper")  # section 4.3
    named = {"matching": 4e-3, "image": 0.2, "patch": 1e-4, "group": 1e-2, "l2": 1e-4, "tv": 1e-4}
    assert {name: getattr(gradvit, name) for name in named} == named
    assert gradvit.phases() == ((0.0, 4e-3), (0.5, 2e-3))
    budget = gradvit.budget()
    assert (budget.steps, budget.lr, budget.optimizer) == (120_000, 0.1, "adam")
    assert (budget.schedule, budget.keep) == ("cosine", "last")
    assert gradvit.register_every == 100
    assert budget.rate(60_000) == 0.05  # as the image prior begins
    assert create_attack("gradvit", preset="paper", steps=50, tv=0.0).tv == 0.0


def test_the_second_phase_of_a_short_search_still_moves() -> None:
    budget = create_attack("gradvit").budget()
    assert budget.rate(budget.steps // 2) >= 0.5 * budget.lr


def test_a_network_without_patches_is_searched_without_their_prior() -> None:
    images, labels = photos(32, [5, 6])
    resnet = ModelSpec(name="resnet18", options={"layers": [1] * 4, "channels": [8, 8, 16, 16]})
    result = attack(observe(resnet, images, labels), "gradvit", steps=2)
    assert "no patch prior: this network has no patches" in result.notes


def test_layers_of_the_papers_own_network_can_be_taken_as_they_come() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4))
    half = (0.5, 0.5, 0.5)
    pictures = natural_pictures(32)[:8]
    seen = (pictures - 0.5) / 0.5
    plain = PriorNetwork(network, half, half, half, half, pictures, size=32, scaled=False)
    with torch.no_grad():
        features = network[0](seen)
        by_hand = [features, network[1].eval()(features)]
        wanted = sum(
            (x.transpose(0, 1).flatten(1).mean(1)).norm()
            + (x.transpose(0, 1).flatten(1).var(1) - 1).norm()
            for x in by_hand
        )
    assert float(plain(seen[None])) == pytest.approx(float(wanted), rel=1e-4)

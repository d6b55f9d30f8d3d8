"""Spaces that are searched: pixels, latents, weights."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks.generators import create_generator
from fedsim.attacks.gias import centre_of, draw_latents
from fedsim.attacks.matching.spaces import Latents, Pixels, Weights
from tests.attacks.conftest import GENERATOR
from tests.staging import CPU


def half(images: torch.Tensor) -> torch.Tensor:
    return (images - 0.5) / 0.5


@pytest.mark.parametrize("name", ["dcgan", "stylegan"])
def test_every_image_has_its_own_copy_of_the_weights(name: str) -> None:
    net = create_generator(name, GENERATOR).requires_grad_(False)
    latents = draw_latents(net, 2, 3, torch.Generator().manual_seed(0))
    labels = torch.zeros(2, 3, dtype=torch.long)
    space = Weights(net, latents, labels, half)
    whole = Latents(net, latents, labels, half, centre_of(net, CPU))
    assert torch.allclose(space.images(), whole.images(), atol=1e-5)
    with torch.no_grad():
        for variable in space.variables:
            variable[0, 1] *= 1.1
    changed = (space.images() - whole.images()).abs().flatten(2).amax(2) > 1e-5
    assert changed.tolist() == [[False, True, False], [False, False, False]]


def test_latents_are_drawn_to_the_middle() -> None:
    net = create_generator("stylegan", GENERATOR).requires_grad_(False)
    latents = draw_latents(net, 2, 3, torch.Generator().manual_seed(0))
    labels = torch.zeros(2, 3, dtype=torch.long)
    centre = centre_of(net, CPU)
    space = Latents(net, latents, labels, half, centre, weight=0.5)
    by_hand = 0.5 * (latents - centre).square().flatten(2).sum(2).mean(1)
    penalty = space.penalty()
    assert penalty is not None
    assert torch.allclose(penalty, by_hand)
    assert Latents(net, latents, labels, half, centre).penalty() is None


def test_grey_pixels_are_one_channel_in_the_box() -> None:
    low = torch.tensor([-1.0, -2.0, -3.0]).view(3, 1, 1)
    high = torch.tensor([1.0, 1.0, 2.0]).view(3, 1, 1)
    space = Pixels(torch.randn(1, 2, 3, 4, 4) * 5, low, high, grey=True)
    assert space.variables[0].shape == (1, 2, 1, 4, 4)
    space.constrain()
    pixels = (space.images() - low) / (high - low)
    assert torch.allclose(pixels[:, :, 0], pixels[:, :, 2], atol=1e-6)
    assert 0 <= float(pixels.detach().min()) <= float(pixels.detach().max()) <= 1

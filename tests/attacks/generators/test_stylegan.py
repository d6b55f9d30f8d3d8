"""StyleGAN: a style for each layer."""

from __future__ import annotations

import torch

from fedsim.attacks.generators import create_generator, generate, latents_of
from tests.attacks.generators.conftest import SMALL


def test_styles_are_searched_layer_by_layer() -> None:
    net = create_generator("stylegan", SMALL)
    latents = latents_of(net, torch.randn(2, 8))
    assert latents.shape == (2, 4, 8)  # 4, 8, 16 and 32 pixels
    changed = latents.clone()
    changed[:, -1] += 1
    assert not torch.equal(generate(net, latents), generate(net, changed))

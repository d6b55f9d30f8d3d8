"""Networks that generate: images of their size, and labels they listen to."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks.generators import (
    create_generator,
    generate,
    latents_of,
)
from tests.attacks.generators.conftest import SMALL


@pytest.mark.parametrize("name", ["dcgan", "stylegan"])
@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("channels", [1, 3])
def test_generators_make_images_of_their_size(name: str, size: int, channels: int) -> None:
    net = create_generator(name, {"image_size": size, "channels": channels, **SMALL})
    images = generate(net, latents_of(net, torch.randn(2, 8))).detach()
    assert images.shape == (2, 3, size, size)
    assert 0 <= float(images.min()) <= float(images.max()) <= 1
    assert torch.equal(images[:, 0], images[:, 1]) == (channels == 1)


@pytest.mark.parametrize("name", ["dcgan", "stylegan"])
def test_a_conditional_generator_listens_to_its_label(name: str) -> None:
    net = create_generator(name, {"num_classes": 3, **SMALL})
    latents = latents_of(net, torch.randn(1, 8))
    first, second = (generate(net, latents, torch.tensor([k])) for k in (0, 1))
    assert not torch.equal(first, second)

"""DCGAN: transposed convolutions from a latent to an image."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks.generators.dcgan import Dcgan


def test_a_picture_is_doubled_from_four_pixels_to_its_size() -> None:
    net = Dcgan(image_size=32, channels=1, latent_size=8, width=4).eval()
    assert net(torch.randn(3, 8)).shape == (3, 1, 32, 32)
    assert [layer.out_channels for layer in net.layers[::3]] == [16, 8, 4, 1]


def test_pictures_of_a_batch_do_not_disturb_each_other() -> None:
    net = Dcgan(image_size=16, latent_size=8, width=4).eval()
    latents = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(net(latents)[1:2], net(latents[1:2]), atol=1e-6)


def test_a_label_moves_the_latent_of_a_conditional_one() -> None:
    net = Dcgan(image_size=16, latent_size=8, width=4, num_classes=3).eval()
    latents, label = torch.randn(1, 8), torch.tensor([2])
    by_hand = net(latents + net.embed(label))
    assert torch.equal(net(latents, label), by_hand)
    assert not torch.equal(net(latents), by_hand)


@pytest.mark.parametrize("options", [{"channels": 2}, {"image_size": 30}])
def test_what_it_cannot_draw_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"1 or 3|power of two"):
        Dcgan(**options)

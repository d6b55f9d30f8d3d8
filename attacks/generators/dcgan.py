"""DCGAN's generator (Radford et al. 2016): transposed convolutions from a latent to an image.

Trained here as the decoder of a variational autoencoder, which at this size gets further in a
minute than a GAN. Without training it is the deep image prior that GIAS searches in ``w``.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from fedsim.attacks.generators.network import doublings_of


class Dcgan(nn.Module):
    """``width``: channels of the last hidden layer. ``num_classes`` > 0 makes it conditional."""

    def __init__(
        self,
        image_size: int = 32,
        channels: int = 3,
        latent_size: int = 64,
        width: int = 48,
        num_classes: int = 0,
    ):
        super().__init__()
        doublings = doublings_of(image_size)
        if channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, not {channels}")
        self.image_size, self.channels, self.latent_size = image_size, channels, latent_size
        self.num_classes = num_classes
        self.embed = nn.Embedding(num_classes, latent_size) if num_classes else None
        widths = [width * 2**k for k in reversed(range(doublings))]
        layers: list[nn.Module] = [
            nn.ConvTranspose2d(latent_size, widths[0], 4, 1, 0, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(),
        ]
        for before, after in itertools.pairwise(widths):
            layers += [
                nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
        layers.append(nn.ConvTranspose2d(widths[-1], channels, 4, 2, 1))
        self.layers = nn.Sequential(*layers)

    def forward(self, latents: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.embed is not None and labels is not None:
            latents = latents + self.embed(labels)
        return torch.sigmoid(self.layers(latents[:, :, None, None]))

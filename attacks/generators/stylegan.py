"""A small generator after StyleGAN2 (Karras et al. 2020): a mapping network and modulated layers.

Each layer is modulated by a style of its own, so the space that is searched is W+: one style per
layer and image, which starts where the mapping network puts z.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.attacks.generators.network import doublings_of

MOST_MAPPING = 64  # layers of the mapping network; the paper has 8


class _Modulated(nn.Module):
    """A convolution whose weights are scaled by a style, and normalised again (demodulation)."""

    def __init__(self, before: int, after: int, style: int, kernel: int, demodulate: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(after, before, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(after))
        self.style = nn.Linear(style, before)
        nn.init.ones_(self.style.bias)
        self.demodulate, self.gain = demodulate, 1 / math.sqrt(before * kernel * kernel)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        scale = self.style(style)[:, :, None, None]
        weight = self.weight * self.gain
        y = F.conv2d(x * scale, weight, padding=weight.shape[-1] // 2)
        if self.demodulate:
            power = scale.flatten(1).square() @ weight.square().sum((2, 3)).T
            y = y * torch.rsqrt(power + 1e-8)[:, :, None, None]
        return y + self.bias[:, None, None]


class StyleGan(nn.Module):
    """``width``: channels at the full size; twice as many at each smaller one, 8 times at most."""

    def __init__(
        self,
        image_size: int = 32,
        channels: int = 3,
        latent_size: int = 64,
        width: int = 32,
        mapping: int = 3,
        num_classes: int = 0,
    ):
        super().__init__()
        doublings = doublings_of(image_size)
        if not 0 <= mapping <= MOST_MAPPING:
            raise ValueError(f"mapping must lie between 0 and {MOST_MAPPING}, not {mapping}")
        self.image_size, self.channels, self.latent_size = image_size, channels, latent_size
        self.num_classes = num_classes
        self.embed = nn.Embedding(num_classes, latent_size) if num_classes else None
        layers: list[nn.Module] = []
        for _ in range(mapping):
            layers += [nn.Linear(latent_size, latent_size), nn.LeakyReLU(0.2)]
        self.mapping = nn.Sequential(*layers)
        widths = [width * min(8, 2**k) for k in reversed(range(doublings + 1))]
        self.start = nn.Parameter(torch.randn(1, widths[0], 4, 4))
        pairs = [(widths[0], widths[0]), *itertools.pairwise(widths)]
        self.layers = nn.ModuleList(_Modulated(a, b, latent_size, 3) for a, b in pairs)
        self.colours = nn.ModuleList(
            _Modulated(b, channels, latent_size, 1, demodulate=False) for _, b in pairs
        )

    def latents(self, z: Tensor) -> Tensor:
        """W+: (B, layers, latent_size)."""
        z = z * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-8)
        styles: Tensor = self.mapping(z)
        return styles[:, None].expand(-1, len(self.layers), -1)

    def forward(self, latents: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.embed is not None and labels is not None:
            latents = latents + self.embed(labels)[:, None]
        x = self.start.expand(len(latents), -1, -1, -1)
        image: Tensor | None = None
        for number, (layer, colour) in enumerate(zip(self.layers, self.colours, strict=True)):
            if number:
                x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            x = F.leaky_relu(layer(x, latents[:, number]), 0.2) * math.sqrt(2)
            rgb = colour(x, latents[:, number])
            if image is None:
                image = rgb
            else:
                up = F.interpolate(image, scale_factor=2, mode="bilinear", align_corners=False)
                image = up + rgb
        assert image is not None
        return torch.sigmoid(image)

"""Perceptual distance (LPIPS, Zhang et al. 2018): how far apart pictures look to a classifier.

The linear heads come with the package `lpips`; the backbone under them is fetched once (`fedsim
weights fetch`). The true picture of a victim is compared with many reconstructions, so its features
are computed once (`LpipsFeatures`).
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.errors import ModelError
from fedsim.core.weights import load_backbone

SMALLEST = 32  # pixels per side; smaller pictures are enlarged, or nothing is left to look at
CHUNK = 16  # pictures at once

Net = Literal["alex", "vgg"]


@dataclass(frozen=True)
class LpipsFeatures:
    """What LPIPS compares of a batch: unit features, layer by layer."""

    layers: list[Tensor]


def lpips_unavailable(net: Net = "alex") -> str | None:
    """Why LPIPS cannot be computed here, or None."""
    try:
        load_network(net)
    except ModelError as error:
        return f"LPIPS needs a backbone: {str(error).rstrip('.')}"
    return None


def lpips(a: Tensor, b: Tensor, net: Net = "alex") -> Tensor | None:
    """LPIPS of each pair, (B, 3, H, W) in [0, 1]; None where `lpips_unavailable` says why."""
    if lpips_unavailable(net):
        return None
    parts = [
        lpips_between(lpips_features(one, net), lpips_features(two, net), net)
        for one, two in zip(a.split(CHUNK), b.split(CHUNK), strict=True)
    ]
    return torch.cat(parts)


@torch.no_grad()
def lpips_features(images: Tensor, net: Net = "alex") -> LpipsFeatures:
    """The unit features of every layer that LPIPS looks at; small pictures are enlarged first, as
    the papers on small pictures do."""
    network: Any = load_network(net)
    if (side := min(images.shape[-2:])) < SMALLEST:
        images = F.interpolate(
            images.float(), scale_factor=SMALLEST / side, mode="bilinear", antialias=False
        )
    layers = network.net(network.scaling_layer(2 * images.float() - 1))
    return LpipsFeatures([_unit(layer) for layer in layers])


@torch.no_grad()
def lpips_between(a: LpipsFeatures, b: LpipsFeatures, net: Net = "alex") -> Tensor:
    """LPIPS from features: per layer the weighted squared difference, averaged over places."""
    heads: Any = load_network(net).lins
    total = torch.zeros(len(b.layers[0]))
    for head, one, two in zip(heads, a.layers, b.layers, strict=True):
        total += head((one - two).square()).mean((2, 3)).flatten()
    return total


def _unit(layer: Tensor) -> Tensor:
    return layer / (layer.square().sum(1, keepdim=True).sqrt() + 1e-10)


@functools.cache
def load_network(net: Net) -> nn.Module:
    """The package's LPIPS with its backbone; raises where the backbone was not fetched."""
    import lpips as package

    layers = load_backbone(f"lpips-{net}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = package.LPIPS(net=net, pnet_rand=True, verbose=False)
    convolutions = [module for module in network.net.modules() if isinstance(module, nn.Conv2d)]
    for module, (weight, bias) in zip(convolutions, layers, strict=True):
        module.weight.data.copy_(weight)
        assert module.bias is not None
        module.bias.data.copy_(bias)
    network.requires_grad_(False)
    frozen: nn.Module = network.eval()
    return frozen

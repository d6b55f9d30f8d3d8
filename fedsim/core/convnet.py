"""A small plain convolutional network, registered with timm as ``convnet``.

No normalisation, no pooling, no skips: the network on which the gradient-inversion literature makes
its first experiments, and the one whose layers can be inverted one by one (R-GAP).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.models import register_model
from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
}


class ConvNet(nn.Sequential):
    """Convolutions of ``channels`` with ``strides``, an activation after each, then one linear head
    on all features."""

    def __init__(
        self,
        img_size: int = 32,
        num_classes: int = 10,
        channels: Sequence[int] = (32, 64, 128, 128),
        strides: Sequence[int] | int = 2,
        kernel_size: int = 3,
        activation: str = "relu",
        bias: bool = True,
        head_bias: bool = True,
    ):
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}")
        steps = [strides] * len(channels) if isinstance(strides, int) else list(strides)
        if len(steps) != len(channels):
            raise ValueError("strides and channels must have the same length")
        layers: list[nn.Module] = []
        side, before = img_size, 3
        for width, stride in zip(channels, steps, strict=True):
            layers += [
                nn.Conv2d(before, width, kernel_size, stride, kernel_size // 2, bias=bias),
                ACTIVATIONS[activation](),
            ]
            side, before = (side + 2 * (kernel_size // 2) - kernel_size) // stride + 1, width
        layers += [nn.Flatten(), nn.Linear(before * side * side, num_classes, bias=head_bias)]
        super().__init__(*layers)
        self.num_classes = num_classes

    def get_classifier(self) -> nn.Module:
        return self[-1]


@register_model
def convnet(pretrained: bool = False, **options: Any) -> ConvNet:
    """A small plain convolutional network."""
    if pretrained:
        raise ValueError("there are no pretrained weights of convnet")
    known = {k: v for k, v in options.items() if k not in ("pretrained_cfg", "cache_dir")}
    known.pop("pretrained_cfg_overlay", None)
    return ConvNet(**known)

"""A plain network of linear layers with an activation between them, registered with timm as
``mlp``.

Its first layer reads the whole picture: the network on which exact inversion of whole batches is
shown (SPEAR), and the simplest one there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.models import register_model
from torch import nn

from fedsim.core.convnet import ACTIVATIONS


class Mlp(nn.Sequential):
    """Linear layers of ``hidden`` units on all pixels, an activation after each, then a head."""

    def __init__(
        self,
        img_size: int = 32,
        num_classes: int = 10,
        hidden: Sequence[int] = (800,),
        activation: str = "relu",
        bias: bool = True,
        head_bias: bool = True,
    ):
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}")
        layers: list[nn.Module] = [nn.Flatten()]
        before = 3 * img_size * img_size
        for width in hidden:
            layers += [nn.Linear(before, width, bias=bias), ACTIVATIONS[activation]()]
            before = width
        super().__init__(*layers, nn.Linear(before, num_classes, bias=head_bias))
        self.num_classes = num_classes

    def get_classifier(self) -> nn.Module:
        return self[-1]


@register_model
def mlp(pretrained: bool = False, **options: Any) -> Mlp:
    """A plain network of linear layers."""
    if pretrained:
        raise ValueError("there are no pretrained weights of mlp")
    known = {k: v for k, v in options.items() if k not in ("pretrained_cfg", "cache_dir")}
    known.pop("pretrained_cfg_overlay", None)
    return Mlp(**known)

"""What tests of guards share: a client with a batch before a small ViT."""

from __future__ import annotations

import torch
from torch import nn

from fedsim.core.guard import Scene
from fedsim.core.learning import Protocol
from tests.defenses.conftest import pictures, vit

__all__ = ["vit"]


def scene_of(model: nn.Module, count: int = 4, round_: int = 1, **options) -> Scene:
    return Scene(round_, 0, model, pictures(count), Protocol(), **options)


@torch.no_grad()
def fish(model: nn.Module, target: int, gap: float = 1000.0) -> None:
    """Only pictures of one class send a gradient behind the head."""
    model.head.weight.zero_()
    coin = torch.Generator().manual_seed(0)
    model.head.weight[target] = torch.randn(model.head.weight.shape[1], generator=coin)
    model.head.bias.fill_(gap)
    model.head.bias[target] = 0

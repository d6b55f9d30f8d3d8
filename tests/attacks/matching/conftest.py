"""What tests of the search share: small models, their gradients, pictures of noise."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fedsim.attacks.matching.objectives import Target
from fedsim.core.learning import Protocol, local_update
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec

VIT = ModelSpec(options={"patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3})
RESNET = ModelSpec(
    name="resnet18",
    options={"layers": [1, 1, 1, 1], "channels": [8, 16, 16, 16], "output_stride": 8},
)


def model_of(spec: ModelSpec, side: int = 32) -> nn.Module:
    return build_model(spec, image_size=side, num_classes=5, seed=0).train()


def target_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Target:
    update = local_update(model, [(images, labels)], Protocol(mean=(0, 0, 0), std=(1, 1, 1)))
    return Target(update.tensors)


def pictures(count: int, seed: int, side: int = 32) -> torch.Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(F.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0))


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 4))

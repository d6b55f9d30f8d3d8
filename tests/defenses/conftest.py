"""What tests of defenses share: a small ViT, a batch, the upload of a client."""

from __future__ import annotations

import pytest
import torch

from fedsim.core.learning import Protocol, local_update
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec

BATCH = [(torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([1]))]


@pytest.fixture
def vit():
    spec = ModelSpec(options={"patch_size": 8, "depth": 2, "embed_dim": 96})
    return build_model(spec, image_size=32, num_classes=5, seed=0)


def secret(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def upload(vit, defense, batch=BATCH, seed: int = 0):
    return local_update(vit, batch, Protocol(), defenses=[defense], rng=secret(seed))


def pictures(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    coin = torch.Generator().manual_seed(1)
    labels = torch.arange(count) % 5
    return [(torch.rand(count, 3, 32, 32, generator=coin), labels)]

"""Vision Transformers: found, or declined in the attack's own name."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks.transformers import refuse_zeros, transformer_parts
from fedsim.core.errors import AttackError
from fedsim.core.models import build_model
from tests.staging import TINY, convnet


def test_the_parts_of_a_transformer_are_those_of_the_model() -> None:
    parts = transformer_parts(build_model(TINY, image_size=32, num_classes=8, seed=0), "GradViT")
    assert parts.blocks


def test_another_network_is_declined_in_the_attacks_name() -> None:
    with pytest.raises(AttackError, match="GradViT attacks Vision Transformers"):
        transformer_parts(convnet(), "GradViT")


def test_a_gradient_of_zeros_is_told_with_its_reason() -> None:
    model, zeros = build_model(TINY, image_size=32, num_classes=8, seed=0), torch.zeros(3)
    refuse_zeros(torch.ones(3), "its", model, "mine")
    with pytest.raises(AttackError, match=r"mine: its gradient is zero, so .* to solve\.$"):
        refuse_zeros(zeros, "its", model, "mine")
    torch.nn.init.zeros_(model.head.weight)
    with pytest.raises(AttackError, match="the head's weights are all zero in this round"):
        refuse_zeros(zeros, "its", model, "mine")

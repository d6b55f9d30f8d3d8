"""Laplace noise: its strength and its tails."""

from __future__ import annotations

import pytest

from fedsim.core.learning import Protocol, local_update
from fedsim.defenses import create_defense
from tests.defenses.conftest import BATCH, upload


def test_laplace_noise_has_the_strength_and_the_tails_it_says(vit) -> None:
    noise = create_defense("laplace_noise", std=0.01)
    plain, noisy = local_update(vit, BATCH, Protocol()), upload(vit, noise)
    name = "blocks.0.mlp.fc1.weight"
    apart = noisy.tensors[name] - plain.tensors[name]
    assert float(apart.std()) == pytest.approx(0.01, rel=0.05)
    assert float(apart.abs().mean()) == pytest.approx(0.01 / 2**0.5, rel=0.05)  # Gauss: .8

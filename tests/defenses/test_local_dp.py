"""Local differential privacy: the noise of Flower's mod."""

from __future__ import annotations

import math

import pytest
import torch

from fedsim.defenses import create_defense
from tests.defenses.conftest import upload


def test_local_dp_clips_and_adds_the_noise_of_flowers_mod(vit) -> None:
    defense = create_defense("local_dp", clip=0.5, epsilon=3.0, delta=1e-4)
    assert defense.deviation == pytest.approx(0.5 * (2 * math.log(1.25 / 1e-4)) ** 0.5 / 3.0)
    clipped = upload(vit, create_defense("clipping", norm=0.5)).tensors
    noisy = upload(vit, defense).tensors
    apart = torch.cat([(noisy[n] - clipped[n]).flatten() for n in clipped])
    assert float(apart.std()) == pytest.approx(defense.deviation, rel=0.02)

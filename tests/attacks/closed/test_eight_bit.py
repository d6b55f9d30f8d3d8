"""The 8-bit grid: how far a picture is from it, and the nearest on it."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks.closed.eight_bit import SNAP_BELOW, distance_to_8_bit, on_8_bit_grid


def test_numbers_at_random_lie_a_quarter_of_a_step_away() -> None:
    image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert distance_to_8_bit(image) == pytest.approx(0.25, abs=0.01)
    assert distance_to_8_bit(on_8_bit_grid(image)) < 1e-4 < SNAP_BELOW
    assert float((on_8_bit_grid(image) - image).abs().max()) <= 0.5 / 255 + 1e-6


def test_pixels_at_the_ends_say_nothing() -> None:
    image = torch.tensor([0.0, 1.0, 100.1 / 255])
    assert distance_to_8_bit(image) == pytest.approx(0.1, abs=1e-4)
    assert distance_to_8_bit(torch.zeros(3)) == 1

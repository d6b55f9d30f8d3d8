"""Sketches: small, and near to how far tensors moved."""

from __future__ import annotations

import pytest
import torch

from fedsim.defenses.guards.sketches import SUMS, moved, norms_of, sketch_of


@pytest.mark.parametrize("shape", [(7,), (192, 193), (700, 300)])
def test_a_sketch_tells_about_how_far_a_tensor_moved(shape: tuple[int, ...]) -> None:
    coin = torch.Generator().manual_seed(0)
    before, step = (torch.randn(shape, generator=coin) for _ in range(2))
    for change in (0.01 * step, torch.full(shape, 0.01)):  # what varies, and what is all alike
        far = float(moved({"w": before + change}, sketch_of({"w": before}))[0])
        assert far == pytest.approx(float(change.norm()), rel=0.5)


def test_what_did_not_move_is_told_exactly() -> None:
    tensors = {"a": torch.rand(3, 5), "b": torch.rand(100_000)}
    assert moved(tensors, sketch_of(tensors)).tolist() == [0, 0]


def test_a_sketch_is_small_and_in_the_tensors_order() -> None:
    tensors = {"a": torch.zeros(100_000), "b": torch.full((4,), 2.0)}
    assert sketch_of(tensors).shape == (2, SUMS)
    assert norms_of(tensors).tolist() == [0, 4]

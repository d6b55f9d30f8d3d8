"""Jigsaws: masks, orders and patches, each by hand."""

from __future__ import annotations

import pytest
import torch

from fedsim.defenses.jigsaw import block_mask, rearrange, scramble_pixels, shuffled_order
from tests.defenses.conftest import secret


@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (4, 4), (8, 8), (14, 14), (3, 7)])
@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 0.9, 1.0])
def test_a_mask_has_the_size_that_was_asked_for(grid: tuple[int, int], ratio: float) -> None:
    patches = grid[0] * grid[1]
    for seed in range(20):
        assert int(block_mask(grid, ratio, secret(seed)).sum()) == min(
            patches, max(2, int(patches * ratio))
        )


def test_only_the_patches_of_the_mask_change_places() -> None:
    mask = block_mask((8, 8), 0.4, secret(1))
    order = shuffled_order(mask, secret(2))
    assert sorted(order.tolist()) == list(range(64))
    assert torch.equal(order[~mask], torch.arange(64)[~mask])
    assert not torch.equal(order[mask], torch.arange(64)[mask])


def test_patches_come_where_the_order_says() -> None:
    images = torch.arange(16.0).view(1, 1, 4, 4)
    moved = rearrange(images, (2, 2), torch.tensor([3, 1, 2, 0]))
    assert moved[0, 0, :2, :2].tolist() == [[10, 11], [14, 15]]
    assert moved[0, 0, 2:, 2:].tolist() == [[0, 1], [4, 5]]
    assert torch.equal(moved[0, 0, :2, 2:], images[0, 0, :2, 2:])
    assert torch.equal(rearrange(moved, (2, 2), torch.tensor([3, 1, 2, 0])), images)


def test_scrambled_pixels_stay_in_their_patch() -> None:
    images = torch.rand(2, 3, 8, 8)
    mask = torch.tensor([True, False, False, False])
    moved = scramble_pixels(images, (2, 2), mask, secret())
    assert torch.equal(moved[..., 4:], images[..., 4:])
    corner = images[..., :4, :4].flatten(-2).sort(-1).values
    assert torch.equal(moved[..., :4, :4].flatten(-2).sort(-1).values, corner)
    assert not torch.equal(moved, images)

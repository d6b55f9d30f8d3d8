"""Jigsaw: which patches of an image are taken, and in which order they are put back.

Masks are drawn in blocks, as in BEiT (Bao et al. 2022); one mask and one order for a whole batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LEAST_BLOCK = 8  # patches; smaller grids take what there is
_ASPECT = 0.3  # the least of a block; the largest is its inverse
_TRIES = 20


def block_mask(grid: tuple[int, int], ratio: float, rng: torch.Generator) -> Tensor:
    """A mask (N,) of about ``ratio`` of the patches, in blocks; two at least, since one alone has
    nobody to change places with."""
    rows, columns = grid
    target = min(rows * columns, max(2, int(rows * columns * ratio)))
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    for _ in range(_TRIES):
        missing = target - int(mask.sum())
        if missing <= 0:
            break
        area = _between(min(_LEAST_BLOCK, missing), missing, rng)
        aspect = math.exp(_between(math.log(_ASPECT), -math.log(_ASPECT), rng))
        height = max(1, min(rows, round(math.sqrt(area * aspect))))
        width = max(1, min(columns, round(math.sqrt(area / aspect))))
        top, left = _below(rows - height + 1, rng), _below(columns - width + 1, rng)
        block = torch.zeros_like(mask)
        block[top : top + height, left : left + width] = True
        if int((block & ~mask).sum()) <= missing:
            mask |= block
    flat = mask.flatten()
    # Blocks may fall short: single patches bring it to the target.
    free = torch.nonzero(~flat)[:, 0]
    order = free[torch.randperm(len(free), generator=rng)]
    flat[order[: target - int(flat.sum())]] = True
    return flat


def shuffled_order(mask: Tensor, rng: torch.Generator) -> Tensor:
    """Which patch comes to each place, (N,): those of the mask among themselves, others stay."""
    order = torch.arange(len(mask))
    taken = torch.nonzero(mask)[:, 0]
    order[taken] = taken[torch.randperm(len(taken), generator=rng)]
    return order


def rearrange(images: Tensor, grid: tuple[int, int], order: Tensor) -> Tensor:
    """Images (B, C, H, W) with their patches in another order; what no patch covers stays."""
    (rows, columns), (height, width) = grid, images.shape[-2:]
    p, q = height // rows, width // columns
    covered = images[..., : rows * p, : columns * q]
    patches = covered.unflatten(-2, (rows, p)).unflatten(-1, (columns, q))  # B C r p c q
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)[:, order.to(images.device)]
    moved = patches.unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
    result = images.clone()
    result[..., : rows * p, : columns * q] = moved.reshape(covered.shape)
    return result


def scramble_pixels(
    images: Tensor, grid: tuple[int, int], mask: Tensor, rng: torch.Generator
) -> Tensor:
    """The pixels inside the masked patches in one random order, the same for all of them."""
    (rows, columns), (height, width) = grid, images.shape[-2:]
    p, q = height // rows, width // columns
    inside = torch.randperm(p * q, generator=rng).to(images.device)
    result = images.clone()
    for place in torch.nonzero(mask)[:, 0].tolist():
        y, x = (place // columns) * p, (place % columns) * q
        patch = images[..., y : y + p, x : x + q].flatten(-2)
        result[..., y : y + p, x : x + q] = patch[..., inside].unflatten(-1, (p, q))
    return result


def _between(low: float, high: float, rng: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=rng))


def _below(count: int, rng: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=rng))

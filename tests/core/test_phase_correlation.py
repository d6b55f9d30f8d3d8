"""Phase correlation: a shift is found again."""

from __future__ import annotations

import pytest
import torch

from fedsim.core.phase_correlation import cyclic_shifts, largest_overlaps


@pytest.mark.parametrize("shift", [(0, 0), (3, 0), (0, 5), (7, 11)])
def test_a_cyclic_shift_is_found_again(shift: tuple[int, int]) -> None:
    picture = torch.rand(16, 24, generator=torch.Generator().manual_seed(0))
    moved = picture.roll((-shift[0], -shift[1]), dims=(0, 1))
    onto, other = (torch.fft.rfft2(image)[None] for image in (picture, moved))
    assert cyclic_shifts(onto, other, (16, 24)).tolist() == [list(shift)]


def test_flat_pictures_have_no_shift() -> None:
    flat = torch.fft.rfft2(torch.full((1, 8, 8), 0.5))
    assert cyclic_shifts(flat, flat, (8, 8)).tolist() == [[0, 0]]


def test_the_largest_overlap_is_that_of_the_best_of_all_shifts() -> None:
    pictures = torch.rand(3, 3, 6, 7, generator=torch.Generator().manual_seed(0))
    onto, others = pictures[0], pictures[1:]
    by_hand = [
        max(float((onto * o.roll((d, r), (1, 2))).sum()) for d in range(6) for r in range(7))
        for o in others
    ]
    found = largest_overlaps(torch.fft.rfft2(onto), torch.fft.rfft2(others), (6, 7))
    assert found.tolist() == pytest.approx(by_hand, rel=1e-5)

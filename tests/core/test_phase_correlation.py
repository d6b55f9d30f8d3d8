"""Phase correlation: a shift is found again."""

from __future__ import annotations

import pytest
import torch

from fedsim.core.phase_correlation import cyclic_shifts


@pytest.mark.parametrize("shift", [(0, 0), (3, 0), (0, 5), (7, 11)])
def test_a_cyclic_shift_is_found_again(shift: tuple[int, int]) -> None:
    picture = torch.rand(16, 24, generator=torch.Generator().manual_seed(0))
    moved = picture.roll((-shift[0], -shift[1]), dims=(0, 1))
    onto, other = (torch.fft.rfft2(image)[None] for image in (picture, moved))
    assert cyclic_shifts(onto, other, (16, 24)).tolist() == [list(shift)]


def test_flat_pictures_have_no_shift() -> None:
    flat = torch.fft.rfft2(torch.full((1, 8, 8), 0.5))
    assert cyclic_shifts(flat, flat, (8, 8)).tolist() == [[0, 0]]

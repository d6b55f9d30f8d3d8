"""Registration: a shift is found, and undone only where that helps."""

from __future__ import annotations

import torch

from fedsim.attacks.matching.registration import align, shift_between


def test_a_shift_is_found_and_kept_only_where_it_helps() -> None:
    coin = torch.Generator().manual_seed(0)
    picture = torch.rand(3, 16, 16, generator=coin)
    moved = torch.roll(picture, (3, -2), dims=(1, 2))
    assert shift_between(moved, picture) == (-3, 2)
    back, shift = align(moved, picture)
    assert torch.equal(back, picture)
    assert shift == (-3, 2)
    other = torch.full((3, 16, 16), 0.5)
    kept, shift = align(picture, other)
    assert torch.equal(kept, picture)
    assert shift == (0, 0)

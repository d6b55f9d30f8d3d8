"""Passes: pictures on the 8-bit grid are known as such, and come back as they were."""

from __future__ import annotations

import torch

from fedsim.captures.passes import as_pictures, on_grid
from tests import flower_task as task

MEAN, STD = list(task.MEAN), list(task.STD)


def test_normalised_bytes_are_found_again_exactly() -> None:
    pictures, _ = task.pictures(0, 8)
    found = on_grid(task.normalised(pictures), MEAN, STD)
    assert found is not None
    assert torch.equal(found, pictures)
    again = as_pictures(found, MEAN, STD)
    shape = (1, 3, 1, 1)
    mean, std = torch.tensor(MEAN).view(shape), torch.tensor(STD).view(shape)
    assert torch.equal((again - mean) / std, task.normalised(pictures))


def test_what_is_between_two_levels_is_not_on_the_grid() -> None:
    pictures, _ = task.pictures(0, 8)
    assert on_grid(task.normalised(pictures) + 1e-3, MEAN, STD) is None
    assert on_grid(task.normalised(pictures), [0.4, 0.5, 0.5], STD) is None
    assert on_grid(task.normalised(pictures) * 9, MEAN, STD) is None


def test_other_pictures_come_back_by_the_numbers_they_were_normalised_by() -> None:
    loose = torch.randn(2, 3, 4, 4)
    assert torch.allclose((as_pictures(loose, MEAN, STD) - 0.5) / 0.25, loose, atol=1e-6)
    levels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    assert torch.equal(as_pictures(levels, MEAN, STD), levels.float() / 255)

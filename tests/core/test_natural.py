"""Natural pictures: the same every time, and none that a client may hold."""

from __future__ import annotations

import torch

from fedsim.core.natural import natural_pictures
from tests.staging import photos


def test_they_are_pictures_of_the_size_that_is_asked_for() -> None:
    pictures = natural_pictures(32)
    assert pictures.shape == (24, 3, 32, 32)
    assert float(pictures.min()) >= 0
    assert float(pictures.max()) <= 1
    assert float(pictures.std()) > 0.1
    assert natural_pictures(64).shape[-1] == 64


def test_none_of_them_is_a_clients() -> None:
    own = natural_pictures(16).flatten(1)
    theirs, _ = photos(16, list(range(0, 512, 7)))
    assert float(torch.cdist(own, theirs.flatten(1)).min()) > 1

"""Top-k: the largest numbers of a layer stay."""

from __future__ import annotations

import torch

from fedsim.defenses.top_k import TopK
from tests.defenses.conftest import secret


def test_the_largest_numbers_stay_in_their_places_and_the_rest_is_zero() -> None:
    layer = torch.tensor([[3.0, -1.0, 0.5], [-4.0, 2.0, 0.1]])
    sparse = TopK(sparsity=0.5).sparse(layer, secret())
    assert sparse.tolist() == [[3.0, 0.0, 0.0], [-4.0, 2.0, 0.0]]


def test_one_number_stays_however_small_the_layer() -> None:
    assert TopK(sparsity=0.99).sparse(torch.tensor([1.0, -2.0]), secret()).tolist() == [0.0, -2.0]

"""Top-k: the largest numbers of a layer stay."""

from __future__ import annotations

import pytest
import torch

from fedsim.core.learning import Protocol, local_update
from fedsim.defenses.top_k import TopK
from tests.defenses.conftest import BATCH, secret, upload


def test_the_largest_numbers_stay_in_their_places_and_the_rest_is_zero() -> None:
    layer = torch.tensor([[3.0, -1.0, 0.5], [-4.0, 2.0, 0.1]])
    sparse = TopK(sparsity=0.5).sparse(layer, secret())
    assert sparse.tolist() == [[3.0, 0.0, 0.0], [-4.0, 2.0, 0.0]]


def test_one_number_stays_however_small_the_layer() -> None:
    assert TopK(sparsity=0.99).sparse(torch.tensor([1.0, -2.0]), secret()).tolist() == [0.0, -2.0]


@pytest.mark.parametrize("sparsity", [0.5, 0.99])
def test_nothing_that_is_left_out_is_larger_than_what_stays(vit, sparsity: float) -> None:
    plain = local_update(vit, BATCH, Protocol()).tensors
    sparse = upload(vit, TopK(sparsity=sparsity)).tensors
    for layer, tensor in sparse.items():
        present = tensor != 0
        left_out = plain[layer][~present].abs().max()
        assert float(left_out) <= float(tensor[present].abs().min())

"""Sparsification: k numbers of a layer, and what becomes of the rest."""

from __future__ import annotations

import pytest
import torch

from fedsim.core.learning import Protocol, Trail, learn, local_update, recall
from fedsim.defenses import create_defense
from tests.defenses.conftest import BATCH, upload


@pytest.mark.parametrize("name", ["top_k", "random_k"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.99])
def test_sparsification_keeps_exactly_k_a_layer(vit, name: str, sparsity: float) -> None:
    plain = local_update(vit, BATCH, Protocol()).tensors
    sparse = upload(vit, create_defense(name, sparsity=sparsity)).tensors

    def wanted(layer: str) -> int:
        return max(1, round((1 - sparsity) * plain[layer].numel()))

    for layer, tensor in sparse.items():
        present = tensor != 0
        assert int(present.sum()) <= wanted(layer)
        assert torch.equal(tensor[present], plain[layer][present])
    dense = [layer for layer, tensor in plain.items() if bool((tensor != 0).all())]
    assert len(dense) > 10
    for layer in dense:
        assert int((sparse[layer] != 0).sum()) == wanted(layer)


def test_error_feedback_uploads_later_what_was_left_out(vit) -> None:
    """The sum of the uploads falls behind that of the updates by what the client still owes."""
    defense = create_defense("top_k", sparsity=0.9, feedback=True)
    state: dict[str, torch.Tensor] = {}
    plain = local_update(vit, BATCH, Protocol()).tensors
    sent: dict[str, torch.Tensor] = {}
    first = plain
    for round_ in range(3):
        trail = Trail()
        (own,) = recall([defense], state)
        update = learn(vit, BATCH, Protocol(), defenses=[own], trail=trail).tensors
        sent = {n: sent.get(n, 0) + t for n, t in update.items()}
        first = update if round_ == 0 else first
        state = trail.kept_back
    prefix = next(iter(state)).removesuffix(next(iter(plain)))
    for name, tensor in plain.items():
        assert torch.allclose(sent[name] + state[f"{prefix}{name}"], 3 * tensor, atol=1e-5)
    name = "blocks.0.mlp.fc1.weight"
    assert not torch.equal(update[name] != 0, first[name] != 0)  # others have had their turn


def test_without_feedback_nothing_is_kept_back(vit) -> None:
    trail = Trail()
    learn(vit, BATCH, Protocol(), defenses=[create_defense("top_k")], trail=trail)
    assert trail.kept_back == {}

"""What adapters show of the gradient of the layer that they are on."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fedsim.attacks.closed.adapters import adapter_of, adapter_ranks
from fedsim.core.learning import Protocol, local_update
from fedsim.core.lora import Lora
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec
from fedsim.core.trainable import restricted

TINY = ModelSpec(options={"patch_size": 8, "depth": 1, "embed_dim": 48, "num_heads": 3})
QKV = "blocks.0.attn.qkv"


def nets(moved: float) -> tuple[nn.Module, nn.Module]:
    """A plain model and the same behind adapters; with ``moved``, their product added to both."""
    torch.manual_seed(0)
    plain = build_model(TINY, image_size=32, num_classes=5, seed=0)
    adapted = restricted(copy.deepcopy(plain), "lora", Lora(r=4, alpha=8, targets=(QKV,)))
    if moved:
        adapter = adapted.get_submodule(QKV)
        with torch.no_grad():
            adapter.lora_B["default"].weight.normal_(std=moved)
            product = adapter.lora_B["default"].weight @ adapter.lora_A["default"].weight
            plain.get_submodule(QKV).weight.add_(2.0 * product)
    return plain, adapted


def test_adapters_show_rows_and_columns_of_the_gradient_beside_them() -> None:
    plain, adapted = nets(moved=0.1)
    batch = [(torch.rand(2, 3, 32, 32), torch.tensor([0, 3]))]
    whole = local_update(plain, batch, Protocol()).tensors[f"{QKV}.weight"].double()
    update = local_update(adapted, batch, Protocol()).tensors
    adapter = adapter_of(adapted, f"{QKV}.base_layer.weight")
    assert adapter is not None
    assert adapter.moved
    rows, columns = adapter.rows(update), adapter.columns(update)
    assert torch.allclose(rows, adapter.up.T @ whole, atol=1e-5)
    assert torch.allclose(columns, whole @ adapter.down.T, atol=1e-5)


def test_an_adapter_at_zero_shows_columns_alone() -> None:
    _, adapted = nets(moved=0.0)
    update = local_update(adapted, [(torch.rand(1, 3, 32, 32), torch.tensor([1]))], Protocol())
    adapter = adapter_of(adapted, f"{QKV}.base_layer.weight")
    assert adapter is not None
    assert not adapter.moved
    assert adapter.rows(update.tensors) is None
    assert adapter.columns(update.tensors) is not None


def test_ranks_are_those_of_adapters_that_are_trained() -> None:
    _, adapted = nets(moved=0.0)
    names = [f"{QKV}.base_layer.weight", "head.weight"]
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert adapter_ranks(adapted, names, trained) == [4]
    assert adapter_ranks(adapted, names, ["head.weight"]) == []

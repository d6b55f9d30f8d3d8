"""Quantization: as many levels as it says."""

from __future__ import annotations

from fedsim.core.learning import Protocol, local_update
from fedsim.defenses import create_defense
from tests.defenses.conftest import BATCH, upload


def test_quantization_has_as_many_levels_as_it_says(vit) -> None:
    plain = local_update(vit, BATCH, Protocol()).tensors["blocks.0.mlp.fc1.weight"]
    eight = upload(vit, create_defense("quantization")).tensors["blocks.0.mlp.fc1.weight"]
    one = upload(vit, create_defense("quantization", kind="sign"))
    assert len(eight.unique()) <= 255
    assert float((eight - plain).abs().max()) <= float(plain.abs().max()) / 254 + 1e-9
    assert len(one.tensors["blocks.0.mlp.fc1.weight"].abs().unique()) == 1

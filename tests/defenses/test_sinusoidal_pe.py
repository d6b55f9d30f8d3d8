"""Sinusoidal positions: fixed waves of a rank below the number of patches."""

from __future__ import annotations

import pytest
import torch

from fedsim.core.anatomy import vit_parts
from fedsim.core.errors import ModelError
from fedsim.core.learning import Protocol, local_update
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec
from fedsim.defenses import create_defense
from fedsim.defenses.sinusoidal_pe import sinusoids
from tests.defenses.conftest import BATCH


def test_waves_by_hand() -> None:
    waves = sinusoids((2, 2), 4, period=100.0)
    one = torch.tensor(1.0)
    assert torch.allclose(waves[0], torch.tensor([0.0, 1.0, 0.0, 1.0]))
    assert torch.allclose(waves[1], torch.stack([0 * one, one, one.sin(), one.cos()]))  # column 1
    assert torch.allclose(waves[2], torch.stack([one.sin(), one.cos(), 0 * one, one]))  # row 1


def test_their_rank_is_below_the_number_of_patches() -> None:
    assert int(torch.linalg.matrix_rank(sinusoids((8, 8), 192, 10_000.0).double())) < 64


def test_they_are_never_uploaded_and_the_class_token_has_none(vit) -> None:
    net = create_defense("sinusoidal_pe", scale=0.5).prepare_model(vit)
    assert "pos_embed" not in local_update(net, BATCH, Protocol()).tensors
    assert torch.equal(net.pos_embed[0, 0], torch.zeros(96))
    assert torch.equal(net.pos_embed[0, 1:], 0.5 * sinusoids((4, 4), 96, 10_000.0))


def test_a_model_they_do_not_fit_is_refused() -> None:
    with pytest.raises(ModelError, match="divides by 4, not 6"):
        sinusoids((2, 2), 6, 100.0)
    bare = ModelSpec(options={"patch_size": 8, "depth": 1, "embed_dim": 48, "pos_embed": "none"})
    net = build_model(bare, image_size=32, num_classes=5, seed=0)
    with pytest.raises(ModelError, match="needs a model with a position embedding"):
        create_defense("sinusoidal_pe").prepare_model(net)


@pytest.mark.parametrize("odd", ["TokenLast", "Long", "Grid"])
def test_they_stand_where_a_model_keeps_the_positions_of_its_patches(odd: str) -> None:
    spec = ModelSpec(name=f"tests.oddities:{odd}")
    net = build_model(spec, image_size=32, num_classes=5, seed=0)
    create_defense("sinusoidal_pe").prepare_model(net)
    assert torch.equal(vit_parts(net).rows_of(net.places), sinusoids((4, 4), 64, 10_000.0))

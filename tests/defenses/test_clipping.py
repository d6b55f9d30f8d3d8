"""Clipping: the norm is bounded, the direction stays."""

from __future__ import annotations

import pytest
import torch

from fedsim.core.learning import Protocol, local_update
from fedsim.defenses import create_defense
from tests.defenses.conftest import BATCH, upload


def test_clipping_bounds_the_norm_and_keeps_the_direction(vit) -> None:
    plain = local_update(vit, BATCH, Protocol()).tensors
    size = torch.cat([t.flatten() for t in plain.values()]).norm()
    for norm in (0.1 * float(size), 10 * float(size)):
        held = upload(vit, create_defense("clipping", norm=norm)).tensors
        flat = torch.cat([t.flatten() for t in held.values()])
        assert float(flat.norm()) == pytest.approx(min(norm, float(size)), rel=1e-4)
    scaled = {n: t * (flat.norm() / size) for n, t in plain.items()}
    assert all(torch.allclose(held[n], scaled[n], rtol=1e-4) for n in plain)


def test_a_norm_that_changes_from_round_to_round_is_that_of_the_round(vit) -> None:
    defense = create_defense("clipping", norm=1.0, norms=[0.3, 0.2])
    for round_, norm in ((1, 0.3), (2, 0.2), (3, 0.2)):
        held = upload(vit, defense.at_round(round_, 0, [0])).tensors
        flat = torch.cat([t.flatten() for t in held.values()])
        assert float(flat.norm()) == pytest.approx(norm, rel=1e-4)

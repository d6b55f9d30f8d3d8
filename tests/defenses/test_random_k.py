"""Random sparsification: as many numbers, of which chance has chosen."""

from __future__ import annotations

import pytest
import torch

from fedsim.defenses.random_k import RandomK
from tests.defenses.conftest import secret

LAYER = torch.arange(1.0, 1001.0)


def test_the_seed_chooses_the_places() -> None:
    first, same, other = (RandomK(sparsity=0.9).sparse(LAYER, secret(s)) for s in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first != 0, other != 0)
    assert int((first != 0).sum()) == 100


def test_what_is_rescaled_keeps_its_mean() -> None:
    plain = RandomK(sparsity=0.75).sparse(LAYER, secret())
    scaled = RandomK(sparsity=0.75, rescale=True).sparse(LAYER, secret())
    assert torch.equal(scaled, 4 * plain)
    assert float(scaled.mean()) == pytest.approx(float(LAYER.mean()), rel=0.1)


def test_feedback_makes_up_for_it_later_instead() -> None:
    plain = RandomK(sparsity=0.75).sparse(LAYER, secret())
    assert torch.equal(RandomK(0.75, feedback=True, rescale=True).sparse(LAYER, secret()), plain)

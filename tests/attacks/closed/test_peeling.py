"""Peeling: tokens out of bins of several, by taking away those that are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedsim.attacks.closed.peeling import Bins, Reader, read_bins
from fedsim.attacks.manoeuvres.imprinting import CONSTANT, Layout, places_code
from fedsim.core.errors import AttackError

LAYOUT = Layout.fitting(64, (4, 4), (8, 8), rulers=3)


def token(place: int, rulers: list[float], seed: int = 0) -> Tensor:
    """A token as LayerNorm gives it."""
    coin = torch.Generator().manual_seed(seed)
    x = torch.zeros(LAYOUT.width, dtype=torch.float64)
    x[: LAYOUT.code_at.start] = torch.randn(LAYOUT.code_at.start, generator=coin).double()
    x[LAYOUT.code_at] = places_code(LAYOUT)[place]
    x[LAYOUT.rulers_at] = torch.tensor(rulers).double()
    x[LAYOUT.constant] = CONSTANT
    x[LAYOUT.balance] = -x.sum()
    return x / x.std(correction=0)


def bins_of(tokens: list[Tensor], edges: Tensor) -> Bins:
    """Every token in its bin of every ruler, with the weight 2."""
    sums = torch.zeros(LAYOUT.rulers * len(edges), LAYOUT.width, dtype=torch.float64)
    for u in tokens:
        for ruler in range(LAYOUT.rulers):
            at = int(torch.bucketize(u[LAYOUT.rulers_at.start + ruler], edges)) - 1
            if at >= 0:
                entry = 2 * u
                entry[LAYOUT.witness] = 2
                sums[ruler * len(edges) + at] += entry
    return Bins(sums, [edges] * LAYOUT.rulers)


EDGES = torch.tensor([-3.0, -1.0, 0.0, 1.0]).double()


def test_a_token_that_is_never_alone_comes_out_once_the_others_are_known() -> None:
    first = token(1, [-0.5, -0.5, 0.5], 1)  # shares its bins with one of the others each
    second = token(2, [-0.4, 0.6, -0.5], 2)
    third = token(3, [0.5, -0.4, 0.4], 3)
    bins = bins_of([first, second, third], EDGES)
    alone, *_ = Reader(bins, LAYOUT, 0.0).alone(torch.arange(len(bins.sums)))
    assert 0 < len(alone) < 9
    tokens = Reader(bins, LAYOUT, 0.0).read()
    assert sorted(tokens.place.tolist()) == [1, 2, 3]
    for place, u in ((1, first), (2, second), (3, third)):
        x = tokens.x[tokens.place == place][0]
        assert torch.allclose(x, u * (CONSTANT / u[LAYOUT.constant]), atol=1e-9)
    assert torch.allclose(tokens.weight, torch.full((3,), 2.0).double())


@pytest.mark.parametrize("places", [(1, 1), (1, 2)])
def test_two_tokens_that_share_all_their_bins_are_not_claimed(places: tuple[int, int]) -> None:
    pair = [token(place, [0.5, 0.5, 0.5], seed) for seed, place in enumerate(places)]
    assert len(Reader(bins_of(pair, EDGES), LAYOUT, 0.0).read().place) == 0


def test_a_token_is_not_believed_outside_the_bin_that_showed_it() -> None:
    bins = bins_of([token(1, [0.5, 0.5, 0.5])], EDGES)
    moved = Bins(bins.sums.roll(1, 0), bins.edges)
    assert len(Reader(moved, LAYOUT, 0.0).read().place) == 0


def test_every_bin_that_showed_a_token_is_a_vote_for_it() -> None:
    tokens = Reader(bins_of([token(5, [0.5, -0.5, 0.5])], EDGES), LAYOUT, 0.0).read()
    assert tokens.votes.tolist() == [3]


def test_rows_that_read_no_ruler_are_no_bins() -> None:
    weights = {
        "b.mlp.fc1.weight": torch.randn(8, LAYOUT.width),
        "b.mlp.fc1.bias": torch.zeros(8),
        "b.norm2.weight": torch.ones(LAYOUT.width),
    }
    with pytest.raises(AttackError, match="no imprint"):
        read_bins({}, weights, ["b"], LAYOUT)

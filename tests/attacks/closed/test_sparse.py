"""Sparse directions: columns with zeros are found in their span, and mixtures are taken apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedsim.attacks.closed.sparse import Column, ColumnSpace, Search


def product(rows: int, rank: int, wide: int, *, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """M = D Y of a D with half of its numbers zero; M and D."""
    coin = torch.Generator().manual_seed(0)
    d = torch.randn(rows, rank, generator=coin, dtype=torch.float64)
    d = d * (torch.rand(rows, rank, generator=coin) < 0.5)
    y = torch.randn(rank, wide, generator=coin, dtype=torch.float64)
    m = d @ y
    return m + noise * torch.randn(m.shape, generator=coin, dtype=m.dtype), d


def believe(q: Tensor) -> Column:
    return Column(q, q)


def cosines(search: Search, d: Tensor) -> Tensor:
    """Of each column of D, with the nearest that was found."""
    left = search.space.left @ torch.stack([column.q for column in search.found], 1)
    return ((d / d.norm(dim=0)).T @ left).abs().amax(1)


@pytest.mark.parametrize(("rows", "wide"), [(60, 100), (100, 60)])
def test_the_space_is_that_of_the_columns(rows: int, wide: int) -> None:
    m, d = product(rows, 4, wide, noise=1e-6)
    space = ColumnSpace.of(m, 4)
    values = torch.linalg.svdvals(m)
    assert torch.allclose(space.sizes, values[:4])
    assert space.floor == pytest.approx(float(values[4]), rel=1e-6)
    assert torch.allclose(space.left @ space.left.T @ d, d, atol=1e-5)
    assert torch.allclose(space.rows @ space.right, m, atol=1e-4)
    assert float(space.noise.median()) == pytest.approx(1e-6, rel=0.1)
    assert space.rest == pytest.approx(float((values[4:] ** 2).sum()), rel=1e-3)


def test_a_spectrum_that_ends_before_tells_the_rank() -> None:
    m, _ = product(60, 3, 100, noise=1e-6)
    assert ColumnSpace.of(m, 5).rank == 3


def test_zeros_are_told_up_to_the_noise() -> None:
    m, d = product(60, 4, 100, noise=1e-6)
    space = ColumnSpace.of(m, 4)
    q = torch.linalg.lstsq(space.left, d).solution.T
    assert torch.equal(space.zeros(q), d.T == 0)
    assert space.blurred(q[0]) < 1e-3


@pytest.mark.parametrize("rank", [2, 6, 12])
def test_all_columns_are_found(rank: int) -> None:
    m, d = product(250, rank, 60, noise=1e-7)
    search = Search(ColumnSpace.of(m, rank), believe, torch.Generator().manual_seed(0))
    told: list[tuple[int, int]] = []
    search.run(1024, lambda starts, found: told.append((starts, found)))
    assert len(search.found) == rank
    assert float(cosines(search, d).min()) > 1 - 1e-9
    assert not told or told[-1] == (search.starts, rank)


def test_columns_with_most_of_their_zeros_in_common_are_told_apart() -> None:
    _, d = product(250, 6, 60)
    coin = torch.Generator().manual_seed(2)
    both, own = torch.rand(250, 1, generator=coin) < 0.5, torch.rand(250, 3, generator=coin) < 0.9
    d[:, :3] = torch.randn(250, 3, generator=coin, dtype=torch.float64) * (both & own)
    m = d @ torch.randn(6, 60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    search = Search(ColumnSpace.of(m, 6), believe, torch.Generator().manual_seed(0))
    search.run(512, lambda starts, found: None)
    assert float(cosines(search, d).min()) > 1 - 1e-9


def test_what_the_judge_refuses_is_not_kept_and_the_search_ends() -> None:
    m, _ = product(100, 4, 60)
    search = Search(ColumnSpace.of(m, 4), lambda q: None, torch.Generator().manual_seed(0))
    assert search.run(128, lambda starts, found: None) == []
    assert search.starts == 128


def test_a_matrix_of_noise_has_no_columns() -> None:
    m = torch.randn(60, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    search = Search(ColumnSpace.of(m, 4), believe, torch.Generator().manual_seed(0))
    assert search.run(64, lambda starts, found: None) == []


def test_the_same_coin_finds_the_same() -> None:
    m, _ = product(250, 10, 60, noise=1e-7)
    runs = []
    for _ in range(2):
        search = Search(ColumnSpace.of(m, 10), believe, torch.Generator().manual_seed(3))
        search.run(256, lambda starts, found: None)
        runs.append(torch.stack([column.q for column in search.found]))
    assert torch.equal(*runs)

"""The network: begins with the mean picture, and is trusted as far as it is right."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fedsim.attacks.inverting.network import (
    Dropout,
    Inversion,
    best_order,
    error_of,
    in_order,
)
from fedsim.attacks.inverting.rehearsal import Example


def examples(clients: int, labels: Tensor, read: Tensor | None = None, side: int = 4) -> Example:
    coin = torch.Generator().manual_seed(0)
    pictures = torch.rand(clients, labels.shape[1], 3, side, side, generator=coin)
    sketch = torch.randn(clients, 10, generator=coin)
    return Example(sketch, pictures, labels, labels if read is None else read)


def begun(of: Example, side: int = 4) -> Inversion:
    return Inversion.begun(of, torch.full((3, side, side), 0.4), 5, 16, seed=0)


def test_a_fresh_network_says_the_mean_picture() -> None:
    some = examples(6, torch.zeros(6, 1, dtype=torch.long))
    assert torch.allclose(begun(some).pictures(some), torch.tensor(0.4))


def test_an_entry_that_always_is_the_same_does_no_harm() -> None:
    some = examples(6, torch.zeros(6, 1, dtype=torch.long))
    some.sketch[:, 3] = -69.0
    net = begun(some)
    torch.nn.init.normal_(net.leave.weight)
    before = net(some)
    some.sketch[:, 3] = 1e4  # what no simulated client showed is bounded
    assert torch.isfinite(net(some)).all()
    assert not torch.equal(before, net(some))
    assert float(net.spread[3]) == 1


def test_pictures_of_distinct_labels_stand_in_the_order_of_what_was_read() -> None:
    some = examples(2, torch.tensor([[3, 1], [0, 4]]), torch.tensor([[1, 3], [0, 4]]))
    guesses = torch.rand(2, 2, 3, 4, 4)
    assert best_order(guesses, some.pictures, some).tolist() == [[1, 0], [0, 1]]


def test_pictures_of_one_label_stand_where_they_fit_best() -> None:
    some = examples(3, torch.full((3, 4), 2))
    guesses = torch.rand(3, 4, 3, 4, 4, generator=torch.Generator().manual_seed(7))
    errors = error_of(guesses, some.pictures, some)
    for row in range(3):
        least = min(
            float((guesses[row] - some.pictures[row, list(order)]).square().mean())
            for order in itertools.permutations(range(4))
        )
        assert float(errors[row]) == pytest.approx(least)


def test_without_labels_the_best_order_counts() -> None:
    some = examples(2, torch.tensor([[3, 1], [0, 4]]), torch.full((2, 2), -1))
    guesses = some.pictures.flip(1)
    assert torch.equal(in_order(guesses, some.pictures, some), guesses)


def test_labels_that_were_read_are_counted() -> None:
    some = examples(2, torch.tensor([[3, 3], [0, 4]]), torch.tensor([[3, 3], [-1, -1]]))
    assert begun(some)._counts(some.read).tolist() == [[0, 0, 0, 2, 0], [0] * 5]


def test_a_network_is_trusted_as_far_as_it_is_right_on_what_it_never_saw() -> None:
    some = examples(40, torch.zeros(40, 1, dtype=torch.long))

    class Told(Inversion):
        def forward(self, shown: Example, dropout: Dropout | None = None) -> Tensor:
            return TOLD[0]

    net = Told(10, 5, 1, 4, 16)
    net.mean.copy_(torch.full((3, 4, 4), 0.5))
    TOLD[0] = 2 * net.wanted(some)
    exam = net.examine(some)
    assert exam.trust == pytest.approx(0.5)
    assert exam.error == pytest.approx(0, abs=1e-9)
    assert "beats their mean picture" in exam.words
    TOLD[0] = -net.wanted(some)
    exam = net.examine(some)
    assert exam.trust == 0
    assert exam.psnr == exam.psnr_of_mean
    assert "does not beat" in exam.words


TOLD: list[Tensor] = [torch.empty(0)]


def test_large_pictures_come_back_at_their_size() -> None:
    some = examples(2, torch.zeros(2, 1, dtype=torch.long), side=32)
    net = begun(some, side=48)
    assert net.resolution == 32
    assert net.pictures(some).shape == (2, 1, 3, 48, 48)


def test_dropout_is_that_of_its_coin() -> None:
    hidden = torch.ones(4, 1000)
    one, two = (Dropout(0.25, torch.Generator().manual_seed(2))(hidden) for _ in range(2))
    assert torch.equal(one, two)
    assert float(one.mean()) == pytest.approx(1, abs=0.05)
    assert float((one == 0).float().mean()) == pytest.approx(0.25, abs=0.05)

"""The base of every defense: it changes nothing, so that a defense says only what it does."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from fedsim.core.defense import Defense, Exposure, Informed
from fedsim.core.learning import Protocol, digest, local_update

BATCH = (torch.rand(2, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1]))
PLAIN = Protocol(mean=(0, 0, 0), std=(1, 1, 1))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def test_it_changes_no_update() -> None:
    batch = (torch.rand(2, 3, 4, 4), torch.tensor([0, 1]))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    plain, defended = (
        local_update(net, [batch], PLAIN, defenses=defenses) for defenses in ([], [Defense()])
    )
    assert digest(plain.tensors) == digest(defended.tensors)


def test_it_is_the_same_in_every_round_and_keeps_nothing_back() -> None:
    defense = Defense()
    assert defense.at_round(3, 1, [0, 1]) is defense
    assert defense.recall({"a": torch.ones(1)}) is defense
    update = local_update(nn.Sequential(nn.Flatten(), model()), [_pictures()], PLAIN)
    assert defense.keep_back(update, update) == {}
    assert defense.protect_update(update, torch.Generator()) is update


def test_it_promises_nothing_and_hides_nothing() -> None:
    defense, coin = Defense(), np.random.default_rng(0)
    assert defense.budget(Exposure(rate=0.1, steps=3, rounds=3)) is None
    assert defense.choose(np.arange(4), 2, coin) is None
    assert defense.reveal({"a": torch.ones(1)}, 1, [0, 1], [0]) is None
    update = local_update(nn.Sequential(nn.Flatten(), model()), [_pictures()], PLAIN)
    seen = Informed(update)
    assert defense.counter(seen, model()) is seen
    assert defense.encoded_bytes(update) is None


def test_it_tosses_no_coin_and_spares_nothing() -> None:
    defense = Defense()
    assert defense.toss(model(), torch.Generator()) is None
    assert defense.tossed(model()) is None
    assert not defense.spares


def _pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return BATCH[0].view(2, 3, 1, 1), BATCH[1]

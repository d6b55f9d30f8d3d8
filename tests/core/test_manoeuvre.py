"""Manoeuvre: what it is handed, and what a server without one would do."""

from __future__ import annotations

import pytest
import torch

from fedsim.core.learning import Update
from fedsim.core.manoeuvre import Brief, Manoeuvre, Sighting
from fedsim.core.observation import Public
from fedsim.core.spec import Spec, Upload

PUBLIC = Public.of(Spec(), num_classes=3)


def linear() -> torch.nn.Module:
    return torch.nn.Linear(2, 3)


def brief(**about: int) -> Brief:
    weights = {"weight": torch.ones(3, 2), "bias": torch.zeros(3)}
    return Brief(**{"round": 1, "client": 0, "seed": 0, **about}, **rest(weights))


def rest(weights: dict[str, torch.Tensor]) -> dict:
    return {"cohort": (0, 1), "weights": weights, "model": linear, "public": PUBLIC}


def test_a_brief_loads_the_honest_model_in_the_clients_mode() -> None:
    model = brief().loaded()
    assert model.training
    assert torch.equal(model.state_dict()["weight"], torch.ones(3, 2))


def test_the_servers_coin_is_its_own_for_each_round_client_and_purpose() -> None:
    def toss(found: Brief, purpose: str = "") -> float:
        return float(torch.rand(1, generator=found.coin(purpose)))

    assert toss(brief()) == toss(brief())
    others = [brief(round=2), brief(client=1), brief(seed=1)]
    assert len({toss(brief()), toss(brief(), "rows"), *map(toss, others)}) == 5


def test_a_manoeuvre_that_says_nothing_reads_updates_as_they_come() -> None:
    update = Update(Upload.GRADIENT, {"weight": torch.ones(3, 2)}, num_examples=1)
    weights = dict(brief().weights)
    seen = Sighting(1, 0, weights, update, {}, linear, PUBLIC, pictures=1)
    memory: dict = {}
    Manoeuvre().learn(seen, memory)
    Manoeuvre().check_model(linear(), PUBLIC)
    assert Manoeuvre().isolate(seen) is None
    assert memory == {}
    assert torch.equal(seen.loaded().state_dict()["weight"], weights["weight"])
    with pytest.raises(NotImplementedError):
        Manoeuvre().tamper(brief())

"""Inference: what messages and updates say of the training, and what nothing says."""

from __future__ import annotations

import torch

from fedsim.captures.inference import infer, infer_batch, rank_of
from fedsim.captures.log import Messages


def rounds(*configs: dict[str, object]) -> list[Messages]:
    return [
        Messages(round=at, began=0, ended=1, config=config)
        for at, config in enumerate(configs, start=1)
    ]


def test_settings_are_known_by_the_names_that_people_give_them() -> None:
    found = infer({}, rounds({"Learning_Rate": 0.1, "batch-size": 8, "epochs": 2, "optim": "SGD"}))
    assert found.train == {"lr": 0.1, "batch_size": 8, "local_epochs": 2, "optimizer": "sgd"}
    assert not found.missing
    assert len(found.words) == 4


def test_a_declaration_counts_before_a_message() -> None:
    found = infer({"lr": 0.2, "local_steps": 3}, rounds({"lr": 0.1, "epochs": 2}))
    assert found.train == {"lr": 0.2, "local_steps": 3}


def test_rounds_with_another_rate_are_left_out_and_told() -> None:
    found = infer({}, rounds({"lr": 0.1}, {"lr": 0.1}, {"lr": 0.05}))
    assert found.train["lr"] == 0.1
    assert found.odd == {3}
    assert "another train.lr in 1 of 3 rounds" in found.words[-1]


def test_what_could_not_be_a_setting_is_none() -> None:
    assert infer({}, rounds({"lr": "fast", "batch-size": 0.5, "optimizer": "lion"})).train == {}


def test_what_nothing_says_is_named() -> None:
    assert infer({"optimizer": "sgd"}, rounds({})).missing == [
        "train.lr=...",
        "train.local_epochs=... (or train.local_steps=...)",
        "train.batch_size=...",
    ]


def test_a_batch_follows_from_counts_and_rank_together() -> None:
    def batch(examples: list[int | None], rank: int | None, **train: int) -> int | None:
        found = infer(train, [])
        infer_batch(found, examples, rank)
        value: int | None = found.train.get("batch_size")
        return value

    assert batch([1, 1], 3, local_epochs=5) == 1
    assert batch([1, 1], 1, local_steps=1) == 1
    assert batch([4, 4], 4, local_steps=1) == 4
    assert batch([4, 4], 3, local_steps=1) is None
    assert batch([4, None], 4, local_steps=1) is None
    assert batch([4, 4], 4, local_epochs=1) is None  # so it is of two steps of two
    assert batch([1, 1], 3, local_epochs=1) is None  # no one picture gives that
    assert batch([1, 1], None, local_epochs=5) is None


def test_the_rank_of_a_batch_is_the_number_of_its_pictures() -> None:
    coin = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 10, generator=coin)
    update = (scores - scores.mean(1, keepdim=True)).T @ torch.randn(4, 32, generator=coin)
    assert rank_of(update) == 4
    assert rank_of(torch.randn(10, 32, generator=coin)) is None  # as many as there could be
    assert rank_of(torch.zeros(10, 32)) is None


def test_the_term_that_fedprox_asks_for_is_known() -> None:
    found = infer({}, rounds({"proximal-mu": 0.1}, {"proximal-mu": 0.1}))
    assert found.train["strategy_options"] == {"proximal_mu": 0.1}
    assert infer({}, rounds({"proximal-mu": 0.0})).train == {}

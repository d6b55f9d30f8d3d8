"""Privacy budgets over all rounds of a federation."""

from __future__ import annotations

import pytest

from fedsim.core.spec import load_spec
from fedsim.defenses import create_defense
from fedsim.scoring.budgets import budgets


def test_the_budget_counts_every_round_of_the_client_that_spends_most() -> None:
    def told(*overrides: str) -> dict:
        spec = load_spec({}, ["data.image_size=32", "data.clients=4", *overrides])
        (budget,) = budgets(spec)
        return budget

    noise = "defenses=[{name: dp_sgd, noise: 1.0}]"
    one = told(noise, "train={rounds: 1, batch_size: 8}")
    assert one["epsilon"] == pytest.approx(create_defense("dp_sgd").epsilon(8 / 128, 1))
    epochs = told(noise, "train={rounds: 2, batch_size: 8, upload: delta, local_epochs: 1}")
    assert epochs["epsilon"] == pytest.approx(create_defense("dp_sgd").epsilon(8 / 128, 32))
    assert told("defenses=[{name: dp_sgd, noise: 0.0}]")["epsilon"] is None
    local = "defenses=[{name: local_dp, epsilon: 0.9}]"
    rounds = [told(local, f"train={{rounds: {r}}}")["epsilon"] for r in (1, 4)]
    assert rounds[0] < 0.9 < rounds[1] < 4 * 0.9

"""GradInversion: layers, BatchNorm, consistency of seeds, Langevin noise."""

from __future__ import annotations

from fedsim.attacks import create_attack
from tests.attacks.conftest import assert_far_better_than_a_guess


def test_grad_inversion_recovers_an_image_far_better_than_a_guess() -> None:
    assert_far_better_than_a_guess("grad_inversion", steps=200, seeds=2, preset="cpu", tv=0.001)


def test_the_preset_is_that_of_the_paper() -> None:
    inversion = create_attack("grad_inversion", preset="paper")  # section 4
    named = {"matching": 1e-3, "tv": 1e-4, "l2": 1e-6, "bn": 0.1, "group": 0.01}
    assert {name: getattr(inversion, name) for name in named} == named
    budget = inversion.budget()
    assert (budget.steps, budget.lr, budget.warmup, budget.langevin) == (20_000, 0.1, 50, 0.2)
    assert (budget.optimizer, budget.schedule, budget.keep) == ("adam", "cosine", "last")
    assert (inversion.seeds, inversion.register_every) == (8, 100)

"""GradInversion: layers, BatchNorm, consistency of seeds, Langevin noise."""

from __future__ import annotations

from fedsim.attacks import create_attack
from tests.attacks.conftest import assert_far_better_than_a_guess


def test_grad_inversion_recovers_an_image_far_better_than_a_guess() -> None:
    assert_far_better_than_a_guess("grad_inversion", steps=200, seeds=2, preset="cpu", tv=0.001)


def test_the_preset_is_that_of_the_paper() -> None:
    inversion = create_attack("grad_inversion")
    named = {"matching": 1e-3, "tv": 1e-4, "l2": 1e-6, "bn": 0.1, "group": 0.01, "langevin": 0.2}
    assert {name: inversion.weight(name) for name in named} == named
    assert inversion.budget().langevin == 0.2
    assert (inversion.lr, inversion.warmup) == (0.1, 50)

"""Presets: everything that a paper sets comes with its name, and what is given wins."""

from __future__ import annotations

import pytest

from fedsim.attacks import create_attack
from fedsim.core.errors import SpecError

WITH_PRESETS = ("grad_inversion", "gradvit", "deep_inversion")


def test_a_parameter_that_is_given_wins_over_the_preset() -> None:
    assert create_attack("grad_inversion", tv=0.0).tv == 0.0
    assert create_attack("grad_inversion", preset="paper", steps=7).steps == 7
    assert create_attack("grad_inversion").tv == 0.05


@pytest.mark.parametrize("name", WITH_PRESETS)
def test_a_preset_leaves_nothing_open(name: str) -> None:
    for preset in ("paper", "cpu"):
        made = create_attack(name, preset=preset)
        assert set(made.presets["paper"]) == set(made.presets["cpu"])
        assert all(getattr(made, field) is not None for field in made.presets[preset])
    with pytest.raises(SpecError, match="preset"):
        create_attack(name, preset="paperr")

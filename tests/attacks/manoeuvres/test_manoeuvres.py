"""The manoeuvres by name."""

from __future__ import annotations

import pytest

from fedsim.attacks.manoeuvres import Manoeuvre, create_manoeuvre
from fedsim.attacks.manoeuvres.fishing import Fishing
from fedsim.core.errors import SpecError


@pytest.mark.parametrize("name", ["fishing", "inconsistent"])
def test_a_manoeuvre_is_made_by_its_name(name: str) -> None:
    manoeuvre = create_manoeuvre(name)
    assert isinstance(manoeuvre, Manoeuvre)
    assert "tampering" in manoeuvre.needs


def test_parameters_are_checked() -> None:
    assert create_manoeuvre("fishing", target=3, strength=0.5) == Fishing(target=3, strength=0.5)
    with pytest.raises(SpecError, match="did you mean 'target'"):
        create_manoeuvre("fishing", tarjet=3)
    with pytest.raises(SpecError, match="strength"):
        create_manoeuvre("fishing", strength=2)


def test_a_class_from_elsewhere_must_be_a_manoeuvre() -> None:
    with pytest.raises(SpecError, match="must derive"):
        create_manoeuvre("fedsim.attacks.patch_solve:PatchSolve")

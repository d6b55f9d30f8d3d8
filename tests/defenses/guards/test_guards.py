"""The package of guards: made by name, in order, each once, parameters checked."""

from __future__ import annotations

import pytest

from fedsim.core.errors import SpecError
from fedsim.defenses.guards import GUARDS, create_guard, create_guards


@pytest.mark.parametrize("name", GUARDS)
def test_every_guard_is_made_by_its_name_and_only_records_by_default(name: str) -> None:
    guard = create_guard(name)
    assert guard.refuse is False
    assert create_guard(name, refuse=True).refuse is True


def test_guards_come_in_the_order_in_which_they_are_listed() -> None:
    guards = create_guards([{"name": "same_model"}, {"name": "d_snr", "limit": 3}])
    assert [type(guard).__name__ for guard in guards] == ["SameModel", "DSnr"]
    assert guards[1].limit == 3


def test_a_guard_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(SpecError, match="'d_snr' is listed twice"):
        create_guards([{"name": "d_snr"}, {"name": "d_snr"}])


def test_an_unknown_guard_or_parameter_is_refused_with_a_hint() -> None:
    with pytest.raises(SpecError, match="d_snr"):
        create_guard("d_snrr")
    with pytest.raises(SpecError, match=r"no parameter 'limits'.*'limit'"):
        create_guard("d_snr", limits=3)
    with pytest.raises(SpecError, match="limit"):
        create_guard("d_snr", limit=-1)


def test_what_is_no_guard_is_refused() -> None:
    with pytest.raises(SpecError, match=r"must derive from fedsim\.core\.guard\.Guard"):
        create_guard("fedsim.defenses.clipping:Clipping")

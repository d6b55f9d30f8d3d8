"""Suites: versions, members in the order of their cost, no parameters."""

from __future__ import annotations

from typing import Any

import pytest

from fedsim.attacks import create_attack
from fedsim.attacks.suites import suite_called
from fedsim.core.errors import SpecError
from fedsim.core.sections import SUITES
from fedsim.core.spec import Component


@pytest.mark.parametrize("version", SUITES)
def test_every_member_of_a_suite_is_an_attack_with_right_parameters(version: str) -> None:
    suite = suite_called(Component(name=version))
    for member in (*suite.members, suite.check):
        attack: Any = create_attack(member.attack, **member.params)
        if member.kind == "search":
            assert member.evaluations == attack.steps * attack.seeds
    stages = [member.stage for member in suite.members]
    assert stages == sorted(stages), "the cheaper come first"
    titles = [member.component.short_name for member in suite.members]
    assert len(set(titles)) == len(titles)
    checked = next(m for m in suite.members if m.title == suite.checks)
    assert suite.check.params == {**checked.params, "steps": 4 * checked.params["steps"]}


@pytest.mark.parametrize(
    ("component", "words"),
    [
        (Component(name="standard-1", steps=3), "no parameter 'steps'"),
        (Component(name="standard-1", title="mine"), "no parameter 'title'"),
        (Component(name="standard-1", exhaustive="yes"), "true or false"),
        (Component(name="standard-0"), "did you mean 'standard-1'"),
    ],
)
def test_a_suite_that_is_tuned_or_unknown_is_refused(component: Component, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        suite_called(component)

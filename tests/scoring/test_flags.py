"""Flags: each is raised where it should be, and not where it should not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedsim.attacks.suites import Member, suite_called
from fedsim.campaign.jobs import Job
from fedsim.campaign.suites import Cast, Role
from fedsim.core.attack import Fit
from fedsim.core.sections import SUITES
from fedsim.core.spec import Component
from fedsim.scoring.envelope import Weighed
from fedsim.scoring.flags import flags_of

SUITE = suite_called(Component(name=SUITES[-1]))
SEARCH, CLOSED, GUESS = SUITE.checks, "patch_solve", "prior_only"
PLAYED = {
    CLOSED: Role(next(m for m in SUITE.members if m.attack == CLOSED)),
    SEARCH: Role(next(m for m in SUITE.members if m.title == SEARCH)),
    "four times the steps": Role(SUITE.check, sample=True),
}
GOOD = {"canary": {"ok": True}}
NOTHING: dict[str, frozenset[tuple[int, int, int]]] = {}


def _scores(**psnr: float) -> pd.DataFrame:
    names = {"closed": CLOSED, "search": SEARCH, "longer": "four times the steps"}
    rows = [
        {"round": 1, "client": 0, "image": 0, "trial": 0, "attack": names[name], "psnr": value}
        for name, value in psnr.items()
    ]
    return pd.DataFrame(rows)


def _weighed(attack: str, distance: float) -> Weighed:
    job = Job(Path(), Path(), 1, 0, Component(name=attack.replace(" ", "_")), attack, 0)
    return Weighed(job, Fit(distance, distance, complete=True))


def _flags(
    scores: pd.DataFrame | None = None,
    *,
    entry: dict[str, Any] = GOOD,
    tries: tuple[Weighed, ...] = (),
    missing: dict[str, str] | None = None,
    least: float = 15.0,
    also: float | None = None,
    excused: dict[str, frozenset[tuple[int, int, int]]] = NOTHING,
) -> dict[str, str]:
    scores = _scores(closed=15.0, search=15.0, longer=15.5) if scores is None else scores
    cast = Cast(SUITE, False, (), missing or {})
    psnr = [least] if also is None else [least, also]
    envelope = pd.DataFrame(
        [{"round": 1, "client": 0, "image": i, "psnr": p} for i, p in enumerate(psnr)]
    )
    found = flags_of(cast, PLAYED, scores, envelope, [entry], tries, excused, GUESS)
    return {flag["flag"]: flag["words"] for flag in found}


def test_nothing_is_flagged_where_nothing_is_wrong() -> None:
    tries = (_weighed(GUESS, 0.9), _weighed(SEARCH, 0.3))
    assert _flags(tries=tries) == {}


def test_a_failed_canary_is_flagged() -> None:
    assert set(_flags(entry={"canary": {"ok": False}})) == {"canary"}


@pytest.mark.parametrize(("closed", "flagged"), [(36.0, True), (34.0, False)])
def test_a_closed_form_far_ahead_of_every_search_is_flagged(closed: float, flagged: bool) -> None:
    assert ("closed_form" in _flags(_scores(closed=closed, search=15.0))) == flagged


def test_what_only_a_closed_form_was_tried_on_does_not_count() -> None:
    assert _flags(_scores(closed=160.0)) == {}


@pytest.mark.parametrize(("distance", "flagged"), [(0.9, True), (0.95, True), (0.85, False)])
def test_a_search_that_explains_no_more_than_the_guess_is_flagged(
    distance: float, flagged: bool
) -> None:
    tries = (_weighed(GUESS, 0.9), _weighed(SEARCH, distance), _weighed(CLOSED, 0.0))
    assert ("no_better_than_guess" in _flags(tries=tries)) == flagged


@pytest.mark.parametrize(("longer", "flagged"), [(16.5, True), (13.5, True), (15.9, False)])
def test_a_budget_that_decides_is_flagged(longer: float, flagged: bool) -> None:
    found = _flags(_scores(search=15.0, longer=longer))
    assert ("budget" in found) == flagged


@pytest.mark.parametrize(("least", "flagged"), [(20.0, True), (90.0, False)])
def test_a_false_proof_is_flagged(least: float, flagged: bool) -> None:
    spared = {SEARCH: frozenset({(1, 0, 0)})}
    found = _flags(least=least, excused=spared)
    assert ("proof" in found) == flagged
    check_alone = {"four times the steps": frozenset({(1, 0, 0)})}
    assert "proof" not in _flags(least=least, excused=check_alone)


def test_a_proof_is_of_the_pictures_that_a_manoeuvre_left() -> None:
    """One of a batch of two stood out of the update, and came back."""
    exact = _weighed(CLOSED, 0.0)
    spared = {SEARCH: frozenset({(1, 0, 0)})}
    for one, flagged in ((exact, False), (replace(exact, pictures=2), True)):
        found = _flags(least=15.0, also=90.0, tries=(one,), excused=spared)
        assert ("proof" in found) == flagged


def test_a_member_that_lacked_something_is_flagged_with_what() -> None:
    found = _flags(missing={"gias": "the spec provides no generator"})
    assert "gias: the spec provides no generator" in found["declined"]


def test_members_are_of_the_kinds_that_flags_compare() -> None:
    kinds = {member.kind for member in SUITE.members}
    assert {"closed", "search"} <= kinds
    assert isinstance(PLAYED[CLOSED].member, Member)

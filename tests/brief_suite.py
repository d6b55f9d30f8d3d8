"""A suite of few steps, for tests of what becomes of suites."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedsim.attacks import suites
from fedsim.attacks.suites import Suite, suite_called
from fedsim.core.sections import SUITES
from fedsim.core.spec import Component


def brief(monkeypatch: pytest.MonkeyPatch, *, closed: bool = True) -> Suite:
    """Let the newest suite search for two steps, and ask nobody who was in a batch, which takes
    hundreds of gradients; ``closed``: with its closed forms."""
    whole = suite_called(Component(name=SUITES[-1]))
    kept = [m for m in whole.members if closed or m.kind != "closed"]
    kept = [m for m in kept if m.attack != "membership"]
    members = tuple(
        replace(m, params={**m.params, "steps": 2, "seeds": 1}, evaluations=2)
        if m.kind == "search"
        else m
        for m in kept
        if m.kind != "search" or m.title in ("cosine tv 0.1", "layers")
    )
    check = replace(whole.check, params={**whole.check.params, "steps": 8, "seeds": 1})
    suite = replace(whole, members=members, check=check)
    monkeypatch.setitem(suites._SUITES, suite.version, suite)
    return suite

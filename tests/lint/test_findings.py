"""Findings: the worst decides."""

from __future__ import annotations

from fedsim.lint.findings import Finding, exit_code


def test_the_worst_finding_is_the_exit_code() -> None:
    certain, likely, note = (Finding("labels", s, "") for s in ("certain", "likely", "note"))
    assert exit_code([]) == exit_code([note]) == 0
    assert exit_code([note, likely]) == 4
    assert exit_code([likely, certain, note]) == 5

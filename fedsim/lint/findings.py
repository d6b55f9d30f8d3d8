"""Findings: what a rule says of a spec."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["certain", "likely", "note"]
SEVERITIES: tuple[Severity, ...] = ("certain", "likely", "note")
EXIT_CODES: dict[Severity, int] = {"certain": 5, "likely": 4, "note": 0}


@dataclass(frozen=True)
class Finding:
    """``remedy``: overrides of the spec that remove it; ``threat``: the letter of the weakest
    attacker who can use it, where that matters."""

    rule: str
    severity: Severity
    reason: str
    remedy: tuple[str, ...] = ()
    threat: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "remedy": list(self.remedy)}


def exit_code(findings: Iterable[Finding]) -> int:
    """5: something certain; 4: something likely; 0: notes at most."""
    return max((EXIT_CODES[finding.severity] for finding in findings), default=0)

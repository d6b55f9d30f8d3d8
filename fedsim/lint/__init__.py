"""Lint: what is certain to leak, told from the spec and the model's shapes before any round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fedsim.audit.trust import refuse_imports
from fedsim.core.errors import SpecError, did_you_mean
from fedsim.core.spec import Spec
from fedsim.lint.facts import Facts, gather
from fedsim.lint.findings import SEVERITIES, Finding, exit_code
from fedsim.lint.rules import NAMES, RULES

__all__ = ["Facts", "Finding", "Lint", "gather", "lint"]


@dataclass(frozen=True)
class Lint:
    """The findings of a spec, worst first, and the facts they rest on."""

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        return exit_code(self.findings)

    def of(self, rule: str) -> list[Finding]:
        """The findings of one rule."""
        return [finding for finding in self.findings if finding.rule == rule]

    def as_json(self) -> dict[str, Any]:
        facts, rehearsal = self.facts, self.facts.rehearsal
        return {
            "name": facts.spec.name,
            "spec_digest": facts.spec.digest(),
            "exit_code": self.exit_code,
            "findings": [finding.as_json() for finding in self.findings],
            "facts": {
                "images_behind_an_update": facts.images,
                "local_steps": facts.steps,
                "clients_a_round": facts.spec.cohort_size,
                "classes": facts.classes,
                "tokens": asdict(facts.tokens) if facts.tokens is not None else None,
                "head_uploaded": list(facts.head),
                "batchnorm_layers": facts.batchnorms,
            },
            "rehearsal": {
                "closed_form": rehearsal.form,
                "psnr": list(rehearsal.psnr),
                "psnr_without_defenses": list(rehearsal.bare),
                "labels_read": rehearsal.labels,
                "declined": rehearsal.declined,
            },
        }


def lint(spec: Spec, ignore: Iterable[str] = (), *, trust: bool = False) -> Lint:
    """Every rule on the facts of ``spec``, but for those named in ``ignore``.

    Nothing that it names by import path is imported, unless ``trust`` says so.
    """
    refuse_imports(spec, trust=trust)
    left_out = set(ignore)
    for name in left_out - set(NAMES):
        known = ", ".join(NAMES)
        raise SpecError(f"there is no rule '{name}'{did_you_mean(name, NAMES)}; known: {known}.")
    facts = gather(spec)
    findings = [finding for rule in RULES for finding in rule(facts)]
    findings = [finding for finding in findings if finding.rule not in left_out]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Lint(facts, tuple(findings))

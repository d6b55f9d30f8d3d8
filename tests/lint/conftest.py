"""What tests of linting share: specs to lint, and what was said of them."""

from __future__ import annotations

import json

from fedsim.lint import Lint, lint
from tests.conftest import small_spec

EXACT_RULES = ("exact-inversion", "exact-inversion-fixed-positions")


def vit(patch_size: int = 8, embed_dim: int = 96, depth: int = 2, **more: object) -> str:
    options = {"patch_size": patch_size, "depth": depth, "embed_dim": embed_dim, **more}
    return f"model.options={json.dumps(options)}"


def defended(*defenses: str | dict) -> str:
    named = [{"name": d} if isinstance(d, str) else d for d in defenses]
    return f"defenses={json.dumps(named)}"


def linted(*overrides: str) -> Lint:
    return lint(small_spec(*overrides), trust=True)


def severities(result: Lint, rule: str) -> list[str]:
    return [finding.severity for finding in result.of(rule)]


def predicts_exact(result: Lint) -> bool:
    return any("certain" in severities(result, rule) for rule in EXACT_RULES)

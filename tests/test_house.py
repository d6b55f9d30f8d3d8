"""The house: layers import downwards only, and no attack can reach the vault."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("fedsim", "attacks", "defenses", "clients", "experiments")

MAY_IMPORT = {
    "fedsim/core": {"fedsim.core"},
    "attacks": {"attacks", "fedsim.core"},
    "defenses": {"defenses", "fedsim.core"},
    "clients": {"clients", "defenses", "fedsim.core"},
}


def imports(file: Path) -> set[str]:
    """Our own modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in OURS}


def closure(files: list[Path]) -> set[Path]:
    """Every file of ours that ``files`` import, directly or through others."""
    seen: set[Path] = set()
    waiting = list(files)
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for name in imports(file):
            for path in (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py"):
                if (ROOT / path).is_file():
                    waiting.append(ROOT / path)
    return seen


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_a_layer_imports_only_what_is_below_it(layer: str) -> None:
    for file in (ROOT / layer).rglob("*.py"):
        for name in imports(file):
            allowed = any(name == ok or name.startswith(f"{ok}.") for ok in MAY_IMPORT[layer])
            assert allowed, f"{file.relative_to(ROOT)} imports {name}"


def test_no_attack_imports_the_vault_not_even_through_others() -> None:
    reached = closure(sorted((ROOT / "attacks").rglob("*.py")))
    assert ROOT / "fedsim/core/knowledge.py" in reached
    assert ROOT / "fedsim/core/vault.py" not in reached


def test_nothing_in_the_project_loads_a_pickle() -> None:
    for package in OURS:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    owner = getattr(node.func.value, "id", "")
                    assert (owner, node.func.attr) != ("pickle", "load"), file
                    assert (owner, node.func.attr) != ("pickle", "loads"), file
                    if (owner, node.func.attr) == ("torch", "load"):
                        safe = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
                        assert safe.get("weights_only") is True, file

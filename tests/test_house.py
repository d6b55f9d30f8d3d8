"""The house: layers import downwards only, no attack can reach the vault, tests mirror modules."""

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
    loads = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for package in OURS
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and _may_run_a_pickle(node)
    ]
    assert loads == []


def called(call: ast.Call) -> str:
    """``function`` or ``owner.function``."""
    if isinstance(call.func, ast.Attribute):
        return f"{getattr(call.func.value, 'id', '')}.{call.func.attr}"
    return getattr(call.func, "id", "")


def _may_run_a_pickle(call: ast.Call) -> bool:
    name = called(call)
    if name == "torch.load":
        told = {keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords}
        return told.get("weights_only") is not True
    return name in ("pickle.load", "pickle.loads")


# -- tests --------------------------------------------------------------------------------------

MIRRORED = ("fedsim", "attacks", "defenses", "clients")
WITHOUT_NAMESAKE = {
    "fedsim/__init__.py": "what it offers is tested as tests/test_api.py",
}


def modules_with_logic() -> list[Path]:
    """Files of ours that define a function or a class, but for what a link shows twice."""
    return [
        file
        for package in MIRRORED
        for file in sorted((ROOT / package).rglob("*.py"))
        if not any(folder.is_symlink() for folder in file.parents)
        and any(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            for node in ast.parse(file.read_text()).body
        )
    ]


def namesake(module: Path) -> Path:
    """Where its tests stand; those of a package's own file are named after the package."""
    parts = module.relative_to(ROOT).parts
    rooms = parts[1:-1] if parts[0] == "fedsim" else parts[:-1]
    name = module.stem if module.stem != "__init__" else module.parent.name
    return Path("tests", *rooms, f"test_{name}.py")


def test_every_module_with_logic_has_a_test_file_of_its_name() -> None:
    modules = modules_with_logic()
    assert len(modules) > 100
    missing = {
        str(module.relative_to(ROOT)): str(namesake(module))
        for module in modules
        if not (ROOT / namesake(module)).is_file()
    }
    assert missing.keys() == WITHOUT_NAMESAKE.keys(), missing


def asserts(node: ast.AST) -> bool:
    """An assertion, or a call of something that makes one."""
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = called(node)
    last = name.rpartition(".")[2].lstrip("_")
    return name in ("pytest.raises", "pytest.warns") or last.startswith(("assert", "check"))


def test_every_test_asserts_something() -> None:
    silent = [
        f"{file.relative_to(ROOT)}::{node.name}"
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not any(map(asserts, ast.walk(node)))
    ]
    assert silent == []

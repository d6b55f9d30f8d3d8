"""The house: rooms import downwards only, no attack can reach the vault, tests mirror modules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("fedsim", "attacks", "defenses", "clients", "experiments")

# Every room, and below it what it may import beside itself.
MAY_IMPORT = {
    "fedsim.core": set[str](),
    "fedsim.attacks": {"fedsim.core"},
    "fedsim.defenses": {"fedsim.core"},
    "fedsim.clients": {"fedsim.core", "fedsim.defenses"},
    "fedsim.cluster": {"fedsim.core"},
}
MAY_IMPORT["fedsim.federation"] = {*MAY_IMPORT} - {"fedsim.attacks"}
MAY_IMPORT["fedsim.captures"] = {"fedsim.core", "fedsim.defenses", "fedsim.federation"}
MAY_IMPORT["fedsim.campaign"] = {*MAY_IMPORT}
MAY_IMPORT["fedsim.scoring"] = {*MAY_IMPORT}
MAY_IMPORT["fedsim.report"] = {*MAY_IMPORT}
MAY_IMPORT["fedsim.audit"] = {*MAY_IMPORT}
BELOW = {*MAY_IMPORT}
SIDE_BY_SIDE = ("fedsim.bench", "fedsim.lint", "fedsim.viewer", "fedsim.tools", "fedsim.board")
for room in SIDE_BY_SIDE:
    MAY_IMPORT[room] = BELOW
MAY_IMPORT["fedsim.deploy"] = {*MAY_IMPORT}
MAY_IMPORT["fedsim.cli"] = {*MAY_IMPORT, "fedsim"}
MAY_IMPORT["experiments"] = {*MAY_IMPORT, "fedsim"}


def files() -> list[Path]:
    """Every source file, once: the links in fedsim are not followed."""
    return sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def module_of(file: Path) -> str:
    """The name a file is imported by."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    inside = ("fedsim",) if parts[0] in ("attacks", "defenses", "clients") else ()
    return ".".join((*inside, *parts)).removesuffix(".__init__")


MODULES = {module_of(file): file for file in files()}


def room_of(module: str) -> str:
    """The room a module stands in; the front door, `fedsim` itself, is none."""
    parts = module.split(".")
    return "experiments" if parts[0] == "experiments" else ".".join(parts[:2])


def imports(file: Path, *, at_once: bool = False) -> set[str]:
    """Our own modules that a file imports: anywhere in it, or only those it needs at once."""
    found = set[str]()
    tree = ast.parse(file.read_text())
    for node in _at_once(tree) if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return {name for name in found if name.split(".")[0] in FOLDERS}


def _at_once(tree: ast.AST) -> list[ast.stmt]:
    """The statements that are run when a module is imported, type checking aside."""
    return [node for node in ast.iter_child_nodes(tree) if isinstance(node, ast.stmt)]


def closure(start: list[str]) -> set[str]:
    """Every module of ours that these import, directly or through others; the front door is passed
    on the way to any of them, and needs the core alone."""
    seen, waiting = set[str](), list(start)
    while waiting:
        module = waiting.pop()
        if module in seen or module == "fedsim" or module not in MODULES:
            continue
        seen.add(module)
        waiting += imports(MODULES[module])
        waiting.append(module.rpartition(".")[0])  # importing a module imports its package
    return seen


def test_every_file_stands_in_a_room_of_the_order() -> None:
    rooms = {room_of(module) for module in MODULES} - {"fedsim"}
    assert rooms == MAY_IMPORT.keys()


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_is_below_it(room: str) -> None:
    for module, file in MODULES.items():
        if room_of(module) != room:
            continue
        for name in imports(file):
            allowed = room_of(name) == room or room_of(name) in MAY_IMPORT[room]
            assert allowed, f"{file.relative_to(ROOT)} imports {name}"


def test_the_front_door_needs_nothing_at_once() -> None:
    assert not imports(MODULES["fedsim"], at_once=True)  # somebody's app imports it, too


def test_no_two_modules_need_each_other_at_once() -> None:
    needs = {
        module: imports(file, at_once=True) & MODULES.keys() for module, file in MODULES.items()
    }
    done, path = set[str](), list[str]()

    def visit(module: str) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        path.append(module)
        for other in sorted(needs[module] - {module}):
            visit(other)
        path.pop()
        done.add(module)

    for module in sorted(needs):
        visit(module)


def test_no_attack_imports_the_vault_not_even_through_others() -> None:
    reached = closure([module for module in MODULES if room_of(module) == "fedsim.attacks"])
    assert "fedsim.core.knowledge" in reached
    assert not reached & {"fedsim.core.vault", "fedsim.core.keyring"}


def test_our_folders_are_imported_as_parts_of_fedsim_alone() -> None:
    for file in [*files(), *(ROOT / "tests").rglob("*.py")]:
        for name in imports(file):
            assert name.split(".")[0] in ("fedsim", "experiments"), f"{file} imports {name}"


def test_nothing_in_the_project_loads_a_pickle() -> None:
    loads = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in files()
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
    "clients/__init__.py": "it opens its modules when they are asked for, and they are tested",
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

"""Registry: what a name stands for, an entry of a table or an import path ``package.module:Class``.

An attack or a defense is a dataclass of its own parameters, so its fields are its whole
configuration; they are checked here, once, with errors that name the nearest right word. Modules
are imported and objects made under the vault's seal: both run their authors' code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from fedsim.core.errors import SpecError, did_you_mean
from fedsim.core.seal import sealed
from fedsim.core.text import brief

Base = TypeVar("Base")

ONCE_AT_THE_TOP = ("attacks", "defenses", "clients")  # as older specs import them


def is_registered(table: Mapping[str, str], name: str) -> bool:
    """Whether a name is an entry of ``table``, or the import path of one: ours, whoever says it."""
    return name in table or name in table.values()


def find(kind: str, table: Mapping[str, str], name: str) -> Any:
    """What ``name`` stands for: an entry of ``table`` or an import path."""
    path = table.get(name, name)
    if ":" not in path:
        known = ", ".join(sorted(table))
        raise SpecError(
            f"unknown {kind} '{name}'{did_you_mean(name, table)}; known: {known}; "
            f"or give an import path 'package.module:Class'."
        )
    module_name, _, attribute = path.partition(":")
    with sealed():  # an error of an author's own is worded by its author, too
        try:
            module = _imported(module_name)
            _SOURCES.note(module)
            return getattr(module, attribute)
        except Exception as error:  # an author's module may fail in any way
            raise SpecError(
                f"the {kind} '{name}' cannot be imported: {type(error).__name__}: {error}."
            ) from error


class _Sources:
    """The hash of each module's source, as it was when the module was first asked for: a file that
    is written anew later is not what runs."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[object, str]] = {}

    def note(self, module: ModuleType) -> str:
        imported = module.__spec__  # another one once it is imported again
        known = self.known.get(module.__name__)
        if known is None or known[0] is not imported:
            known = self.known[module.__name__] = (imported, _hash_of(module))
        return known[1]


_SOURCES = _Sources()


def _hash_of(module: ModuleType) -> str:
    try:
        return hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()
    except (AttributeError, OSError, ValueError):  # typed into a notebook, or compiled
        return ""


def code_digest(table: Mapping[str, str], name: str) -> str:
    """A hash of the file behind an import path, and of the one that its class stands in; nothing
    for an entry of ``table``, and where there is no file. What they import is not looked at."""
    if is_registered(table, name):
        return ""
    found = find("class", table, name)
    with sealed():
        named = sys.modules.get(name.partition(":")[0])
        written = sys.modules.get(str(getattr(found, "__module__", "")))
        hashes = {_SOURCES.note(module) for module in (named, written) if module is not None}
    return hashlib.sha256(" ".join(sorted(hashes)).encode()).hexdigest()[:32] if any(hashes) else ""


def _imported(name: str) -> ModuleType:
    """The module of this name, or the one in `fedsim` that had it in an older version. A command
    finds modules in the folder where it is called, as Python does, behind all that is installed."""
    _look_here_for(name.split(".")[0])
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        lacking = error.name or ""
        if name.split(".")[0] not in ONCE_AT_THE_TOP or not f"{name}.".startswith(f"{lacking}."):
            raise
        return importlib.import_module(f"fedsim.{name}")


def _look_here_for(top: str) -> None:
    try:
        here = str(Path.cwd())
    except OSError:  # the folder was removed
        return
    there = Path(here, f"{top}.py").is_file() or Path(here, top).is_dir()
    if there and here not in sys.path:
        sys.path.append(here)


def resolve(kind: str, table: Mapping[str, str], name: str) -> type:
    """The class behind ``name``, a dataclass of its parameters."""
    cls = find(kind, table, name)
    if not dataclasses.is_dataclass(cls) or not isinstance(cls, type):
        raise SpecError(f"the {kind} '{name}' must be a dataclass of its parameters.")
    return cls


def build(kind: str, table: Mapping[str, str], name: str, params: Mapping[str, Any]) -> Any:
    """An instance of ``name`` with ``params``, types and ranges checked."""
    cls = resolve(kind, table, name)
    allowed = [field.name for field in dataclasses.fields(cls) if field.init]
    for key in params:
        if key not in allowed:
            takes = ", ".join(allowed) or "no parameters"
            raise SpecError(
                f"the {kind} '{name}' has no parameter '{key}'"
                f"{did_you_mean(key, allowed)}; it takes: {takes}."
            )
    with sealed():
        try:
            return TypeAdapter(cls).validate_python(dict(params))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "its parameters"
            got = brief(first.get("input"))
            raise SpecError(f"the {kind} '{name}': {where}: {first['msg']} (got {got}).") from error


def build_as(
    kind: str, table: Mapping[str, str], base: type[Base], name: str, params: Mapping[str, Any]
) -> Base:
    """As `build`, of a class that derives from ``base``: what the testbed calls must be there."""
    found = build(kind, table, name, params)
    if not isinstance(found, base):
        wanted = f"{base.__module__}.{base.__name__}"
        raise SpecError(f"the {kind} '{name}' must derive from {wanted}.")
    return found


def refuse_twice(kind: str, names: Sequence[str]) -> None:
    """Raise where a list names one thing twice."""
    for name in names:
        if names.count(name) > 1:
            raise SpecError(f"the {kind} '{name}' is listed twice.")

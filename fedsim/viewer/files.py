"""Files of a run, read with care: inside its directory, no links, whole or a sentence why not.

Runs are read while others write them, and may come from anywhere. A path that leaves the directory
is refused even where the name in it looks harmless.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from fedsim.core.errors import FedsimError, RunError
from fedsim.core.reading import MOST_BYTES, MOST_JSON, read_file

Parsed = TypeVar("Parsed")

# What reading a damaged file may raise: parsers, shapes, keys and types that are not as expected.
DAMAGE = (
    *(FedsimError, OSError, ValueError, KeyError, IndexError, TypeError, AttributeError),
    *(RuntimeError, ArithmeticError, AssertionError, yaml.YAMLError),
)


def inside(root: Path, path: Path) -> bool:
    """Whether a path is still in the directory when every link in it is followed."""
    try:
        return path.resolve().is_relative_to(root)
    except (OSError, RuntimeError):  # a ring of links
        return False


def read(root: Path, name: str, most: int = MOST_BYTES) -> bytes:
    """A file of a run; never through a link, never a pipe or a device."""
    path = root / name
    if not inside(root, path):
        raise RunError(f"{name} is a link that leaves the run's directory.")
    try:
        return read_file(path, most)
    except OSError as error:
        raise RunError(f"{name} cannot be read: {error.strerror}.") from error


def exists(root: Path, name: str) -> bool:
    return os.path.isfile(root / name) and inside(root, root / name)


class Files:
    """What was parsed of which file, kept until the file changes: pages ask every second."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, str, object], tuple[tuple[int, ...], Any]] = {}
        self._lock = threading.Lock()

    def parse(self, root: Path, name: str, how: Callable[[bytes], Parsed]) -> Parsed | None:
        """The file as ``how`` reads it, None where there is none; RunError says what is wrong."""
        try:
            about = (root / name).lstat()
        except OSError:
            return None
        version = (about.st_mtime_ns, about.st_size, about.st_ino)
        with self._lock:
            known = self._known.get((root, name, how))
        if known is None or known[0] != version:
            known = (version, _attempt(root, name, how))
            with self._lock:
                self._known[root, name, how] = known
        if isinstance(known[1], RunError):
            raise known[1]
        parsed: Parsed = known[1]
        return parsed


def _attempt(root: Path, name: str, how: Callable[[bytes], Parsed]) -> Parsed | RunError:
    try:
        return how(read(root, name, MOST_BYTES if name.endswith(".csv") else MOST_JSON))
    except RunError as error:
        return error
    except DAMAGE as error:
        return RunError(f"{name} is damaged: {reason(error)}")


def reason(error: BaseException) -> str:
    """One line of an error, for a reader."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text.rstrip(".") + "."

"""Run index: the runs and benches under the given directories, found again as they come.

A page names a run by its key, a hash of where it is, and never by a path: what is not in the index
cannot be asked for.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fedsim.core.errors import RunError
from fedsim.core.run import paths
from fedsim.core.text import visible

DEPTH = 4  # folder, bench, cells, cell
FRESH_SECONDS = 2.0  # a page that is polled does not walk the disk every time
NO_FOLDERS = {
    *(paths.VAULT, paths.OBSERVATIONS, paths.RECONSTRUCTIONS, paths.LEARNED, paths.SPOOL),
}


@dataclass(frozen=True)
class Place:
    """A run: where it is, and what to call it."""

    key: str
    root: Path
    name: str


@dataclass(frozen=True)
class Group:
    """The runs of one directory; ``bench`` where it is a benchmark."""

    key: str
    root: Path
    name: str
    runs: list[Place] = field(default_factory=list)
    bench: bool = False


class RunIndex:
    """Finds runs below some directories; links to other directories are not followed."""

    def __init__(self, directories: Iterable[str | Path]):
        self.roots: list[Path] = []
        for directory in directories:
            if not Path(directory).is_dir():
                raise RunError(f"'{directory}' is no directory; give run directories to view.")
            root = Path(directory).resolve()
            if root not in self.roots:
                self.roots.append(root)
        self._groups: list[Group] = []
        self._at = float("-inf")
        self._lock = threading.Lock()

    def groups(self) -> list[Group]:
        """Every directory with runs in it, as the disk is now or was a moment ago."""
        with self._lock:
            if time.monotonic() - self._at > FRESH_SECONDS:
                self._groups, self._at = self._look(), time.monotonic()
            return self._groups

    def runs(self) -> list[Place]:
        return [run for group in self.groups() for run in group.runs]

    def run(self, key: str) -> Place | None:
        return next((run for run in self.runs() if run.key == key), None)

    def bench(self, key: str) -> Group | None:
        return next((g for g in self.groups() if g.bench and g.key == key), None)

    def _look(self) -> list[Group]:
        by_group: dict[Path, list[Path]] = {}
        benches: set[Path] = set()
        for root in self.roots:
            _walk(root, root, DEPTH, by_group, benches)
        run_paths = sorted({run for runs in by_group.values() for run in runs})
        names = short_names(run_paths)
        group_names = short_names(list(by_group))
        taken: set[Path] = set()
        groups = []
        for root, runs in by_group.items():
            new = [run for run in sorted(set(runs)) if run not in taken]
            taken |= set(new)
            places = [Place(_key(run), run, visible(names[run])) for run in new]
            if places or root in benches:
                groups.append(
                    Group(_key(root), root, visible(group_names[root]), places, root in benches)
                )
        return groups


def _walk(
    folder: Path, group: Path, depth: int, by_group: dict[Path, list[Path]], benches: set[Path]
) -> None:
    if os.path.isfile(folder / paths.SPEC):
        by_group.setdefault(group if folder != group else folder.parent, []).append(folder)
        return
    if os.path.isfile(folder / "bench.json"):
        group = folder
        benches.add(folder)
        by_group.setdefault(folder, [])
    if depth == 0:
        return
    try:
        with os.scandir(folder) as entries:
            below = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
    except OSError:  # removed meanwhile, or not ours to read: then there is nothing to show
        return
    for name in below:
        if not name.startswith(".") and name not in NO_FOLDERS:
            _walk(folder / name, group, depth - 1, by_group, benches)


def short_names(paths: list[Path]) -> dict[Path, str]:
    """The shortest end of each path that no other path ends in."""
    ends = Counter(
        "/".join(path.parts[-count:]) for path in paths for count in range(1, len(path.parts) + 1)
    )
    names = {}
    for path in paths:
        tails = ["/".join(path.parts[-count:]) for count in range(1, len(path.parts) + 1)]
        names[path] = next((tail for tail in tails if ends[tail] == 1), str(path))
    return names


def _key(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]

"""A module that nobody asked for: what others shared names it, and an import leaves a mark."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fedsim.core.observation import read_observation, write_observation
from fedsim.core.run import Run, list_observations
from fedsim.core.spec import Spec

CODE = """
import pathlib
from dataclasses import dataclass
from fedsim.core.defense import Defense

pathlib.Path(__file__).with_name("ran").touch()

def call(*args, **options):
    raise RuntimeError("called")

@dataclass(frozen=True)
class Defended(Defense):
    pass
"""


class Stranger:
    """A module of the name ``stranger``, and whether it was imported."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "ran"
        (folder / "stranger.py").write_text(CODE)

    @property
    def ran(self) -> bool:
        return self.mark.exists()


def invite(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Stranger:
    """Make the module importable, not yet imported."""
    folder.mkdir(exist_ok=True)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "stranger", raising=False)
    return Stranger(folder)


def shared_run(source: Run, root: Path, spec: Spec) -> Run:
    """A run somebody shared: the files of ``source`` under another spec."""
    run = Run.create(root, spec)
    kept = shutil.ignore_patterns("spec.yaml", "run.json", "run.lock")
    shutil.copytree(source.root, root, ignore=kept, dirs_exist_ok=True)
    return run


def announce(run: Run, *names: str) -> None:
    """Have the first observation of a run announce these defenses."""
    path = list_observations(run.observations)[0]
    seen = read_observation(path)
    public = replace(seen.public, defenses=[{"name": name} for name in names])
    write_observation(run.observations, seen.round, seen.client, seen.update, public)

"""Folders: where a Ray of ours keeps its files, apart from every other Ray's, and gone with it.

Ray's usual folder has a record of the current cluster, which every plain Ray program follows, even
to a cluster that is gone: nothing of ours is ever written there. Each folder says which process it
is for, so that what a killed one left is removed by the next that comes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from fedsim.cluster.processes import Child, began, tries
from fedsim.core.errors import DamagedError
from fedsim.core.files import read_json, write_json

PREFIX = "fedsim-ray-"
OWNER = "owner.json"
HOUR = 3600.0


def make() -> Path:
    """A new folder, for this process until it is given to another."""
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place()))
    give(folder, Child(os.getpid(), began(os.getpid())))
    return folder


def give(folder: Path, owner: Child) -> None:
    """From here on the folder is for as long as this process lives."""
    write_json(folder / OWNER, asdict(owner) | {"machine": _machine()})


def is_ours(folder: Path) -> bool:
    """Whether a folder was made here for a Ray of this user's: one that somebody merely names may
    be any."""
    try:
        about, owner = folder.lstat(), (folder / OWNER).lstat()
    except OSError:
        return False
    named = folder.name.startswith(PREFIX) and folder.parent.resolve() == place().resolve()
    own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
    return named and own and stat.S_ISREG(owner.st_mode)


def remove(folder: Path) -> None:
    """Remove a folder; what Ray ended a moment ago may still write there."""
    for _ in tries(5):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return


@contextlib.contextmanager
def kept() -> Iterator[Path]:
    """A folder for a while."""
    folder = make()
    try:
        yield folder
    finally:
        remove(folder)


def sweep() -> None:
    """Remove this user's folders whose process is gone."""
    for folder in place().glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            own = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
            if own and _is_left(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    try:
        told = read_json(folder / OWNER)
        return told["machine"] == _machine() and not Child.read(told).lives
    except FileNotFoundError:  # cut short as it was made; or another version's, with Ray's files
        return not any(folder.iterdir()) and time.time() - folder.stat().st_mtime > HOUR
    except (DamagedError, KeyError, TypeError, ValueError):
        return False


def _machine() -> list[str]:
    """Where a process number means this process: containers may share a folder, not numbers."""
    numbers = Path("/proc/self/ns/pid")
    return [socket.gethostname(), os.readlink(numbers) if numbers.is_symlink() else ""]


def place() -> Path:
    """The system's folder for temporary files, or a shorter one: paths of Ray's sockets must be."""
    usual = Path(tempfile.gettempdir())
    return Path("/tmp") if len(str(usual)) > 20 and Path("/tmp").is_dir() else usual

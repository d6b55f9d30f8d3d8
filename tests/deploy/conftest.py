"""Processes that must not be left behind, another user of the machine, runs as a deployment leaves
them, and clients that draw as simulated ones do."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedsim.clients.app import ClientSide, DeployedSide
from fedsim.core.run import Run
from fedsim.core.run.record import Record, write_record


def assert_none_alive(mark: str) -> None:
    """The system takes a moment to clear away what was killed."""
    end = time.monotonic() + 3
    while (left := alive(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


def alive(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in line:
                found.append(int(entry.name))
    return found


@pytest.fixture
def as_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients elsewhere that draw from the spec's seed, so that the two can be compared."""
    monkeypatch.setattr(DeployedSide, "secret", ClientSide.secret)
    monkeypatch.setattr(DeployedSide, "drawn", ClientSide.drawn)


def deployed_copy(run: Run, root: Path) -> tuple[Run, list[Path]]:
    """A finished run as a deployment leaves it: unscored, the vault in parts elsewhere."""
    copy = Run(shutil.copytree(run.root, root / "server" / "run"))
    vaults = []
    for client in range(run.spec.data.clients):
        files = list(copy.vault.rglob(f"client-*{client}.safetensors"))
        for file in files:
            target = root / str(client) / "vault" / file.relative_to(copy.vault)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(file, target)
        if files:
            vaults.append(root / str(client) / "vault")
            shutil.copy(copy.vault / "key.id", vaults[-1])
    shutil.rmtree(copy.vault)
    for name in ("scores.csv", "scores.parquet", "summary.json", "canaries.json"):
        (copy.root / name).unlink()
    for name in ("report.html", "grid.png"):
        (copy.root / name).unlink(missing_ok=True)
    write_record(copy.root, Record.of(copy.spec, deployed=True, classes=None))
    return copy, vaults


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file of a folder; that somebody locked it is of no account."""
    files = [file for file in root.rglob("*") if file.is_file() and file.name != "run.lock"]
    return {str(file.relative_to(root)): file.read_bytes() for file in files}


@contextmanager
def by_nobody() -> Iterator[None]:
    """What is done meanwhile is done by a user without rights; only root can arrange it."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)

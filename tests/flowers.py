"""Flower as its users have it: an app in a folder, `flwr run`, a SuperLink; all of it on ports and
in a home of the test's own, offline, and ended with the test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedsim.cluster.processes import Child, answers, began, end, free_ports, said, tries
from fedsim.deploy.flower import found, pairs, write_home
from tests.traces import processes_with

ROOT = Path(__file__).parents[1]
APP = ROOT / "experiments" / "flower_app"
PATIENCE = 300.0  # seconds for a federation of a few rounds
NODES = 2


@dataclass
class Flower:
    """What `flwr run` is called with: an environment, and the SuperLink's name, if one is up."""

    home: Path
    environment: dict[str, str]
    superlink: str | None = None

    def run(self, app: Path, **config: object) -> str:
        """`flwr run` in the app's folder until the federation has ended; what it says."""
        told = ["-c", pairs({name.replace("_", "-"): v for name, v in config.items()})]
        link = [self.superlink] if self.superlink else []
        return self._called(["flwr", "run", ".", *link, "--stream", *(told if config else [])], app)

    def fedsim(self, folder: Path, *words: str) -> str:
        return self._called([sys.executable, "-m", "fedsim.cli", *words], folder)

    def _called(self, command: list[str], folder: Path) -> str:
        done = subprocess.run(
            found(command),
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stdout[-5000:]
        return done.stdout


@contextmanager
def simulation(home: Path) -> Iterator[Flower]:
    """Flower of a user who has started nothing: the first `flwr run` starts a SuperLink, which
    stays up when that is done."""
    port, control = free_ports(2)
    told = {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": port, "FLWR_LOCAL_CONTROL_API_PORT": control}
    flower = Flower(home, _environment(home, told))
    try:
        yield flower
    finally:
        _end_all(home)


@contextmanager
def deployment(home: Path) -> Iterator[Flower]:
    """A SuperLink and two SuperNodes, each a process with a folder of its own."""
    port, *ports = free_ports(1 + NODES)
    flower = Flower(home, _environment(home, {}), "deployment")
    address = f"127.0.0.1:{port}"
    home.mkdir(parents=True, exist_ok=True)
    write_home(home, address, None)
    here = ["--insecure", "--host", "127.0.0.1", "--port"]
    try:
        _start(flower, "superlink", ["flower-superlink", *here, str(port)])
        assert any(answers(port) for _ in tries(60)), said(home / "superlink" / "log")
        for number, own in enumerate(ports):
            told = pairs({"partition-id": number, "num-partitions": NODES})
            words = [*here, str(own), "--superlink", address, "--node-config", told]
            _start(flower, f"supernode-{number}", ["flower-supernode", *words])
        yield flower
    finally:
        _end_all(home)


def copied(folder: Path) -> Path:
    """The app as it is, in a folder of its own."""
    return Path(shutil.copytree(APP, folder, ignore=shutil.ignore_patterns("__pycache__")))


def patched(app: Path) -> Path:
    """The same with the lines that audit it, put in as its reader would."""
    words = ["patch", "-p1", "--fuzz=0", "-i", str(APP / "audit.patch")]
    done = subprocess.run(words, cwd=app, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return app


def _environment(home: Path, told: dict[str, object]) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return os.environ | {
        "PATH": path,
        "PYTHONPATH": str(ROOT),  # this fedsim, and no other that may be installed
        "FLWR_HOME": str(home / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # Otherwise every run installs what the app depends on, from a registry, into a folder.
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ADDRESS": "local",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
        **{name: str(value) for name, value in told.items()},
    }


def _start(flower: Flower, name: str, command: list[str]) -> None:
    """Each in a folder of its own, as on a machine of its own."""
    folder = flower.home / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("wb") as log:
        subprocess.Popen(
            found(command),
            cwd=folder,
            env=flower.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end_all(home: Path) -> None:
    """End whatever was started with this home, and nothing else."""
    for pid in processes_with(f"FLWR_HOME={home / 'flwr'}"):
        if began(pid) is not None:
            end(Child(pid, began(pid)))

"""Flower's own programs: what they are given, how they are started, and what their logs say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedsim.cluster.processes import Child, answers, child_of, end, last_words, said, spawn, tries
from fedsim.core.errors import DamagedError, RunError
from fedsim.core.files import read_json, write_json

CONNECTION = "deployment"
TOLD = "fedsim error: "  # how the apps say in Flower's log what went wrong
PATIENCE = 120.0  # seconds for a process to come up
APP = """\
[project]
name = "fedsim-deployment"
version = "0.1.0"

[tool.flwr.app]
publisher = "fedsim"

[tool.flwr.app.components]
serverapp = "fedsim_deployment:server"
clientapp = "fedsim_deployment:client"

[tool.flwr.app.config]
spec = ""
public = ""
output = ""
attack = true
"""
APP_CODE = '''"""The apps of fedsim, as every machine of the deployment has them installed."""

from fedsim.deploy.apps import client, server

__all__ = ["client", "server"]
'''


def write_app(folder: Path) -> None:
    """The app that Flower is given: it imports what every machine has installed."""
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").write_text(APP)
    (folder / "fedsim_deployment.py").write_text(APP_CODE)


def write_home(folder: Path, address: str, authority: Path | None) -> None:
    """What Flower's commands in this folder need to find the SuperLink, and to trust it."""
    connection = f"[superlink.{CONNECTION}]\naddress = {json.dumps(address)}\n"
    if authority is None:
        connection += "insecure = true\n"
    else:
        connection += f"root-certificates = {json.dumps(str(authority.absolute()))}\n"
    home = folder / "flwr"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(connection)


def register_command(public: Path) -> list[str]:
    return ["flwr", "supernode", "register", str(public.absolute()), CONNECTION]


def run_command(
    app: Path, spec: Path, public: Path | None, output: Path, *, attack: bool = True
) -> list[str]:
    config = {"spec": str(spec), "output": str(output), "attack": attack}
    config |= {"public": str(public)} if public else {}
    return ["flwr", "run", str(app), CONNECTION, "--stream", "-c", pairs(config)]


@dataclass
class Processes:
    """The children of a deployment: each in a process group and with a log of its own.

    They end with this process. With a ``record`` they are written down as well, so that what still
    goes on after this process was killed can be ended by the next.
    """

    running: dict[str, tuple[subprocess.Popen[bytes], Path]] = field(default_factory=dict)
    record: Path | None = None

    def start(self, name: str, command: list[str], folder: Path) -> None:
        log = folder / f"{name}.log"
        process = spawn(found(command), log, environment(folder), outlives=False)
        self.running[name] = (process, log)
        if self.record:
            children = [asdict(child_of(process)) for process, _ in self.running.values()]
            write_json(self.record, children)

    def check(self) -> None:
        """Raise where one has ended that should not have."""
        for name, (process, log) in self.running.items():
            if process.poll() is not None:
                raise RunError(f"the {name} ended: {why_ended(log)}; its log is '{log}'.")

    def wait_for_port(self, port: int) -> None:
        for _ in tries(PATIENCE):
            self.check()
            if answers(port):
                return
        raise RunError(f"nothing answers on port {port} after {PATIENCE:.0f} s.")

    def stop(self) -> None:
        """End all of them, and what they started: a SuperLink's helpers leave its group."""
        for process, _ in reversed(self.running.values()):
            end(child_of(process))
            process.wait()
        self.running.clear()
        if self.record:
            self.record.unlink(missing_ok=True)


def end_recorded(record: Path) -> None:
    """End what is left of a deployment that was killed."""
    try:
        children = [Child.read(entry) for entry in read_json(record)]
    except FileNotFoundError:
        return
    except (DamagedError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"'{record}' is damaged; look for `flower-superlink` and `flower-supernode` among the "
            f"processes, end those that are yours, and delete it."
        ) from error
    for child in reversed(children):
        if child.lives:
            end(child)
    record.unlink(missing_ok=True)


def call(command: list[str], folder: Path, what: str) -> str:
    """One of Flower's commands that ends by itself."""
    done = subprocess.run(
        found(command),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(folder),
        timeout=PATIENCE,
    )
    if done.returncode:
        raise RunError(f"{what} was refused: {done.stderr or done.stdout or 'no reason given'}")
    return done.stdout


def environment(folder: Path) -> dict[str, str]:
    """Quiet, offline, with Flower's home in the process's own folder."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return os.environ | {
        "PATH": path,
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
    }


def why_ended(log: Path) -> str:
    """Why a SuperLink or SuperNode gave up, in words that say what to do."""
    text = said(log)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "the SuperLink's certificate is not signed by the authority that it was given"
    if "Failed to activate SuperNode" in text:
        return "the SuperLink does not know its key; register it with `flwr supernode register`"
    reason = re.search(r"Exit Code: \d+\n(.+)", text)
    return reason.group(1).strip().rstrip(".") if reason else last_words(log)


def pairs(values: Mapping[str, object]) -> str:
    """As Flower reads them: TOML values, quoted as JSON is."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in values.items())


def found(command: list[str]) -> list[str]:
    beside = Path(sys.executable).parent / command[0]
    return [str(beside) if beside.is_file() else command[0], *command[1:]]

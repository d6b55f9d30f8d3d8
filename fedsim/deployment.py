"""Deployment: the same spec on Flower's own SuperLink and SuperNodes, each a process of its own.

The server's side (SuperLink, ServerApp, attacks) and every SuperNode have a folder each. A client
finds the pictures that were dealt to it in its own and keeps its truth there, in its vault; the
server's side is never told of either.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from clients.dealing import PUBLIC, deal, write_public
from fedsim.core.errors import DamagedError, RunError, SpecError
from fedsim.core.knowledge import granted_by
from fedsim.core.spec import Spec
from fedsim.core.store import Run, read_json, write_json
from fedsim.keys import Keys, check_keys, make_keys
from fedsim.planning import prepare
from fedsim.processes import (
    LOOPBACK,
    Child,
    answers,
    child_of,
    end,
    free_ports,
    last_words,
    said,
    spawn,
    tries,
)
from fedsim.server import read_checkpoint

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

from fedsim.apps import client, server

__all__ = ["client", "server"]
'''


@dataclass(frozen=True)
class Node:
    """One SuperNode: which client it is, and the folder that is its machine."""

    partition: int
    root: Path
    port: int
    key: Path | None = None

    @property
    def vault(self) -> Path:
        return self.root / "vault"

    @property
    def data(self) -> Path:
        """The pictures that it holds: its own, and the public test split."""
        return self.root / "data"

    @property
    def spec(self) -> Path:
        """The client's own copy: how it trains and defends itself."""
        return self.root / "spec.yaml"


@dataclass(frozen=True)
class Deployment:
    """Where everything of a deployment is; without keys it is insecure."""

    root: Path
    port: int
    nodes: tuple[Node, ...]
    keys: Keys | None

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def record(self) -> Path:
        """Which processes it started and has not ended yet."""
        return self.root / "processes.json"

    @property
    def server(self) -> Path:
        return self.root / "server"

    @property
    def run(self) -> Path:
        return self.server / "run"

    @property
    def spec(self) -> Path:
        return self.server / "spec.yaml"

    @property
    def public(self) -> Path:
        """What the server is told of data that it has not."""
        return self.root / PUBLIC

    @property
    def app(self) -> Path:
        return self.server / "app"


def plan_deployment(root: Path, clients: int, keys: Keys | None) -> Deployment:
    """A SuperNode for every client, on ports that are free now."""
    root = root.absolute()
    port, *ports = free_ports(clients + 1)
    nodes = tuple(
        Node(n, root / "nodes" / str(n), ports[n], keys.node(n).absolute() if keys else None)
        for n in range(clients)
    )
    return Deployment(root, port, nodes, keys)


def superlink_command(deployment: Deployment) -> list[str]:
    command = [
        "flower-superlink",
        "--host",
        LOOPBACK,
        "--port",
        str(deployment.port),
        "--disable-runtime-dependency-installation",
    ]
    if deployment.keys is None:
        return [*command, "--insecure"]
    return [
        *command,
        "--ssl-ca-certfile",
        str(deployment.keys.authority.absolute()),
        "--ssl-certfile",
        str(deployment.keys.certificate.absolute()),
        "--ssl-keyfile",
        str(deployment.keys.server_key.absolute()),
        "--enable-supernode-auth",
    ]


def supernode_command(deployment: Deployment, node: Node) -> list[str]:
    own = {
        "partition-id": node.partition,
        "num-partitions": len(deployment.nodes),
        "vault": str(node.vault),
        "data": str(node.data),
        "spec": str(node.spec),
    }
    command = [
        "flower-supernode",
        "--superlink",
        deployment.address,
        "--host",
        LOOPBACK,
        "--port",
        str(node.port),
        "--node-config",
        _pairs(own),
    ]
    if deployment.keys is None:
        return [*command, "--insecure"]
    command += ["--root-certificates", str(deployment.keys.authority.absolute())]
    return [*command, *(["--auth-supernode-private-key", str(node.key)] if node.key else [])]


def register_command(public: Path) -> list[str]:
    return ["flwr", "supernode", "register", str(public.absolute()), CONNECTION]


def run_command(
    app: Path, spec: Path, public: Path | None, output: Path, *, attack: bool = True
) -> list[str]:
    told = {"spec": str(spec), "output": str(output), "attack": attack}
    told |= {"public": str(public)} if public else {}
    return ["flwr", "run", str(app), CONNECTION, "--stream", "-c", _pairs(told)]


def lay_out(deployment: Deployment, spec: Spec) -> None:
    """Folders, the app, a copy of the spec for each side, and to every client its pictures."""
    for folder in (deployment.server, *(node.root for node in deployment.nodes)):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = deployment.spec.read_text() if deployment.spec.is_file() else None
    for path in (deployment.spec, *(node.spec for node in deployment.nodes)):
        # A client may have written defenses of its own there: those are kept.
        if not path.is_file() or path.read_text() == before:
            path.write_text(spec.to_yaml())
    deal(spec, [node.data for node in deployment.nodes])
    write_public(deployment.public, spec)
    write_app(deployment.app)
    authority = deployment.keys.authority if deployment.keys else None
    write_home(deployment.server, deployment.address, authority)


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


@dataclass
class Processes:
    """The children of a deployment: each in a process group and with a log of its own.

    With a ``record`` they are written down, so that they can be ended where this process is
    killed before it does.
    """

    running: dict[str, tuple[subprocess.Popen[bytes], Path]] = field(default_factory=dict)
    record: Path | None = None

    def start(self, name: str, command: list[str], folder: Path) -> None:
        log = folder / f"{name}.log"
        self.running[name] = (spawn(_found(command), log, environment(folder)), log)
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
        children = [Child.read(told) for told in read_json(record)]
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


@contextlib.contextmanager
def started(deployment: Deployment) -> Iterator[Processes]:
    """SuperLink and SuperNodes, the nodes' keys registered; all stopped at the end."""
    processes = Processes(record=deployment.record)
    try:
        processes.start("superlink", superlink_command(deployment), deployment.server)
        processes.wait_for_port(deployment.port)
        if deployment.keys is not None:
            for node in deployment.nodes:
                public = deployment.keys.node_public(node.partition)
                call(register_command(public), deployment.server, "a SuperNode's key")
        for node in deployment.nodes:
            name = f"supernode-{node.partition}"
            processes.start(name, supernode_command(deployment, node), node.root)
        yield processes
    finally:
        processes.stop()


def deploy(
    spec: Spec, root: Path, *, insecure: bool = False, keys: Path | None = None
) -> Deployment:
    """`fedsim deploy`: rounds and attacks of a spec with every client in processes of its own."""
    with set_up(spec, root, insecure=insecure, keys=keys) as deployment:
        carry_out(deployment)
    return deployment


@contextlib.contextmanager
def set_up(
    spec: Spec, root: Path, *, insecure: bool = False, keys: Path | None = None
) -> Iterator[Deployment]:
    """A deployment that is checked and laid out; nobody else works in its folder meanwhile."""
    check_deployable(spec)
    Run(root / "server" / "run").refuse_other(spec)
    prepare(spec)
    with Run(root).locked():
        held: Keys | None = None
        if not insecure:
            held = Keys(keys) if keys else make_keys(root / "keys", spec.data.clients)
            check_keys(held, spec.data.clients)
        deployment = plan_deployment(root, spec.data.clients, held)
        end_recorded(deployment.record)
        lay_out(deployment, spec)
        yield deployment


def carry_out(deployment: Deployment) -> None:
    """Rounds and attacks, and every process ended after them."""
    with started(deployment) as processes:
        federate(deployment, processes)


def federate(deployment: Deployment, processes: Processes) -> None:
    """Submit the run and follow it to its end."""
    command = run_command(deployment.app, deployment.spec, deployment.public, deployment.run)
    processes.start("run", command, deployment.server)
    process, log = processes.running.pop("run")
    try:
        while process.poll() is None:
            processes.check()
            time.sleep(0.2)
    finally:
        end(child_of(process))
        process.wait()
    require_success(deployment.run, process.returncode, log)


def register(address: str, authority: Path, publics: list[Path]) -> None:
    """Let SuperNodes in, by their public keys; one that is known already stays so."""
    with tempfile.TemporaryDirectory() as folder:
        write_home(Path(folder), address, authority)
        for public in publics:
            try:
                call(register_command(public), Path(folder), f"the key '{public}'")
            except RunError as error:
                if "already in use" not in str(error):
                    raise


def submit(
    address: str,
    authority: Path,
    spec: Path,
    output: Path,
    *,
    public: Path | None = None,
    attack: bool = True,
) -> None:
    """Have a SuperLink elsewhere run a spec; it reads and writes the paths on its own disk."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_home(home, address, authority)
        write_app(home / "app")
        processes = Processes()
        try:
            command = run_command(home / "app", spec, public, output, attack=attack)
            processes.start("run", command, home)
            process, log = processes.running["run"]
            process.wait()
            sys.stdout.write(said(log))
            require_success(output, process.returncode, log)
        finally:
            processes.stop()


def require_success(output: Path, code: int, log: Path) -> None:
    """Raise what the server app said, or that rounds are missing: Flower's command does not."""
    if told := re.findall(rf"{TOLD}(.*)", said(log)):
        raise RunError(told[-1])
    run = Run(output)
    wanted = run.spec.train.rounds if run.spec_path.is_file() else 1
    if code or len(read_checkpoint(run).rows) < wanted:
        raise RunError(f"the run did not end well: {last_words(log)}; its log is '{log}'.")


def check_deployable(spec: Spec) -> None:
    """A server that is one cannot be handed the truth while it attacks."""
    oracles = sorted(granted_by(spec.threat) & {"oracle_labels", "batch_statistics"})
    if oracles:
        raise SpecError(
            f"the threat grants {' and '.join(oracles)}, which come from the clients' vaults, and "
            f"a deployed server has none: take another threat, or threat.withhold={oracles}."
        )


def gather(run: Run, vaults: list[Path]) -> int:
    """Copy what the clients kept into the run's own vault, for scoring; how many files."""
    found: dict[Path, Path] = {}
    for vault in vaults:
        files = sorted(vault.rglob("[!.]*.safetensors")) if vault.is_dir() else []
        if not files:
            raise RunError(f"'{vault}' is no vault: it holds no truth of any client.")
        for file in files:
            other = found.setdefault(file.relative_to(vault), file)
            if other != file:
                raise RunError(
                    f"'{other}' and '{file}' are both the truth of the same client and round."
                )
    run.vault.mkdir(mode=0o700, exist_ok=True)
    run.vault.chmod(0o700)
    for name, file in found.items():
        copy = run.vault / name
        if copy.exists() and copy.samefile(file):
            continue
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        copy.chmod(0o600)
    return len(found)


def call(command: list[str], folder: Path, what: str) -> str:
    """One of Flower's commands that ends by itself."""
    done = subprocess.run(
        _found(command),
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
    """Quiet, offline, with a home of Flower's in the process's own folder."""
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
    told = re.search(r"Exit Code: \d+\n(.+)", text)
    return told.group(1).strip().rstrip(".") if told else last_words(log)


def _pairs(values: Mapping[str, object]) -> str:
    """As Flower reads them: TOML values, quoted as JSON is."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in values.items())


def _found(command: list[str]) -> list[str]:
    beside = Path(sys.executable).parent / command[0]
    return [str(beside) if beside.is_file() else command[0], *command[1:]]

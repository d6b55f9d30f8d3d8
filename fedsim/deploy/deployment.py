"""Deployment: the same spec on Flower's own SuperLink and SuperNodes, each a process of its own.

The server's side (SuperLink, ServerApp, attacks) and every SuperNode have a folder each. A client
finds the pictures that were dealt to it in its own and keeps its truth there, in its vault; the
server's side never learns of either. Nodes are told the address of a front that passes their calls
and no others; the SuperLink itself answers the user alone who started the deployment.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedsim.campaign.plan import prepare
from fedsim.clients.dealing import PUBLIC, deal, write_public
from fedsim.cluster.processes import (
    LOOPBACK,
    child_of,
    end,
    free_ports,
    last_words,
    said,
)
from fedsim.core.errors import RunError, SpecError
from fedsim.core.knowledge import granted_by
from fedsim.core.run import Run, paths
from fedsim.core.spec import Spec
from fedsim.core.wire import node_config
from fedsim.deploy.flower import (
    TOLD,
    Processes,
    call,
    end_recorded,
    pairs,
    register_command,
    run_command,
    write_app,
    write_home,
)
from fedsim.deploy.guard import GUARDED, guarded, tells_users
from fedsim.deploy.keys import Keys, check_keys, make_keys
from fedsim.federation.checkpoint import read_checkpoint


@dataclass(frozen=True)
class Node:
    """One SuperNode: which client it is, and the folder that is its machine."""

    partition: int
    root: Path
    port: int
    key: Path | None = None

    @property
    def vault(self) -> Path:
        return self.root / paths.VAULT

    @property
    def data(self) -> Path:
        """The pictures that it holds: its own, and the public test split."""
        return self.root / "data"

    @property
    def spec(self) -> Path:
        """The client's own copy: how it trains and defends itself."""
        return self.root / paths.SPEC


@dataclass(frozen=True)
class Deployment:
    """Where everything of a deployment is; without keys it is insecure."""

    root: Path
    port: int  # of the front
    own_port: int  # of the SuperLink
    nodes: tuple[Node, ...]
    keys: Keys | None

    @property
    def address(self) -> str:
        """What nodes are told: calls of theirs are all that is answered there."""
        return f"{LOOPBACK}:{self.port}"

    @property
    def superlink(self) -> str:
        """Where the operator registers nodes and submits a run."""
        return f"{LOOPBACK}:{self.own_port}"

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
    def scored(self) -> Path:
        """Where whoever may see the truth scores the run: outside of the server's folder."""
        return self.root / "scored"

    @property
    def spec(self) -> Path:
        return self.server / paths.SPEC

    @property
    def public(self) -> Path:
        """What the server is told of data that it does not have."""
        return self.root / PUBLIC

    @property
    def app(self) -> Path:
        return self.server / "app"


def plan_deployment(root: Path, clients: int, keys: Keys | None) -> Deployment:
    """A SuperNode for every client, on ports that are free now."""
    root = root.absolute()
    port, own_port, *ports = free_ports(clients + 2)
    nodes = tuple(
        Node(n, root / "nodes" / str(n), ports[n], keys.node(n).absolute() if keys else None)
        for n in range(clients)
    )
    return Deployment(root, port, own_port, nodes, keys)


def superlink_command(deployment: Deployment) -> list[str]:
    words = [
        "--host",
        LOOPBACK,
        "--port",
        str(deployment.own_port),
        "--disable-runtime-dependency-installation",
    ]
    if deployment.keys is None:
        return guarded("flower-superlink", [*words, "--insecure"])
    words += [
        "--ssl-ca-certfile",
        str(deployment.keys.authority.absolute()),
        "--ssl-certfile",
        str(deployment.keys.certificate.absolute()),
        "--ssl-keyfile",
        str(deployment.keys.server_key.absolute()),
        "--enable-supernode-auth",
    ]
    return guarded("flower-superlink", words)


def front_command(deployment: Deployment) -> list[str]:
    words = ["--host", LOOPBACK, "--port", str(deployment.port)]
    words += ["--superlink", deployment.superlink]
    if deployment.keys is not None:
        words += ["--authority", str(deployment.keys.authority.absolute())]
        words += ["--certificate", str(deployment.keys.certificate.absolute())]
        words += ["--key", str(deployment.keys.server_key.absolute())]
    return guarded("front", words)


def supernode_command(deployment: Deployment, node: Node) -> list[str]:
    config = {
        **node_config(node.partition, len(deployment.nodes)),
        "vault": str(node.vault),
        "data": str(node.data),
        "spec": str(node.spec),
    }
    words = [
        "--superlink",
        deployment.address,
        "--host",
        LOOPBACK,
        "--port",
        str(node.port),
        "--node-config",
        pairs(config),
    ]
    if deployment.keys is None:
        words += ["--insecure"]
    else:
        words += ["--root-certificates", str(deployment.keys.authority.absolute())]
        words += ["--auth-supernode-private-key", str(node.key)] if node.key else []
    return guarded("flower-supernode", words)


def lay_out(deployment: Deployment, spec: Spec) -> None:
    """Folders, the app, a copy of the spec for each side, and to every client its pictures."""
    for folder in (deployment.server, *(node.root for node in deployment.nodes)):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = deployment.spec.read_bytes() if deployment.spec.is_file() else None
    for path in (deployment.spec, *(node.spec for node in deployment.nodes)):
        # A client may have written defenses of its own there, in any encoding: those are kept.
        if not path.is_file() or path.read_bytes() == before:
            path.write_bytes(spec.to_yaml().encode())
    deal(spec, [node.data for node in deployment.nodes])
    write_public(deployment.public, spec)
    write_app(deployment.app)
    authority = deployment.keys.authority if deployment.keys else None
    write_home(deployment.server, deployment.superlink, authority)


def start_server(deployment: Deployment, processes: Processes) -> None:
    """The SuperLink, guarded where this machine can tell users apart, and its front."""
    processes.start("superlink", superlink_command(deployment), deployment.server)
    processes.wait_for_port(deployment.own_port)
    _, log = processes.running["superlink"]
    if tells_users() and GUARDED not in said(log):
        raise RunError(f"the SuperLink is open to other users; its log is '{log}'.")
    processes.start("front", front_command(deployment), deployment.server)
    processes.wait_for_port(deployment.port)


@contextlib.contextmanager
def started(deployment: Deployment) -> Iterator[Processes]:
    """SuperLink, front and SuperNodes, the nodes' keys registered; all stopped at the end."""
    processes = Processes(record=deployment.record)
    try:
        start_server(deployment, processes)
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
        key_set: Keys | None = None
        if not insecure:
            key_set = Keys(keys) if keys else make_keys(root / "keys", spec.data.clients)
            check_keys(key_set, spec.data.clients)
        deployment = plan_deployment(root, spec.data.clients, key_set)
        end_recorded(deployment.record)
        lay_out(deployment, spec)
        yield deployment


def carry_out(deployment: Deployment) -> None:
    """Rounds and attacks, and every process ended after them."""
    with started(deployment) as processes:
        federate(deployment, processes)


def open_to() -> str | None:
    """What a deployment on this machine cannot keep out, in one sentence; None where it can."""
    if tells_users():
        return None
    return (
        "other users of this machine can reach the SuperLink and have it run code as you: the "
        "system does not say whose a connection is, so run this where you are its only user."
    )


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
    if errors := re.findall(rf"{TOLD}(.*)", said(log)):
        raise RunError(errors[-1])
    run = Run(output)
    wanted = run.spec.train.rounds if run.spec_path.is_file() else 1
    if code or len(read_checkpoint(run).rows) < wanted:
        raise RunError(f"the run did not end well: {last_words(log)}; its log is '{log}'.")


def check_deployable(spec: Spec) -> None:
    """Refuse a threat that grants the truth: a deployed server cannot be handed it."""
    oracles = sorted(granted_by(spec.threat) & {"oracle_labels", "batch_statistics", "candidates"})
    if oracles:
        raise SpecError(
            f"the threat grants {' and '.join(oracles)}, which come from the clients' vaults, and "
            f"a deployed server has none: take another threat, or threat.withhold={oracles}."
        )

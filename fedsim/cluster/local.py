"""Local cluster: a Ray on this machine that outlives a run, warm for the next one, and a rehearsal
for many machines.

Each node is one `ray start --block` in a process group of its own. A state file keeps their ids, so
that exactly these are ended, and nothing that anybody else runs; by it a cluster is known as ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedsim.cluster import authentication, folders
from fedsim.cluster.processes import (
    LOOPBACK,
    Child,
    child_of,
    end,
    free_ports,
    last_words,
    spawn,
    tries,
)
from fedsim.core.cache import cache_folder
from fedsim.core.errors import DamagedError, RunError
from fedsim.core.files import read_json, write_atomically, write_json

ATTACK_RESOURCE = "attack"  # offered by a node that takes attack workers


@dataclass(frozen=True)
class Cluster:
    """What a state file says."""

    address: str
    folder: str  # Ray's own files
    nodes: tuple[Child, ...]


def state_file() -> Path:
    return cache_folder() / "cluster.json"


def started_here(address: str) -> bool:
    """Whether what answers at an address is a cluster that was started here and still lives."""
    wanted = address.replace("localhost:", f"{LOOPBACK}:")
    for file in _state_files():
        with contextlib.suppress(RunError, OSError):
            cluster = read(file)
            if cluster is not None and cluster.address == wanted and _head_lives(cluster):
                return True
    return False


def _head_lives(cluster: Cluster) -> bool:
    return bool(cluster.nodes) and cluster.nodes[0].lives


def _state_files() -> Iterator[Path]:
    """Where the states of clusters are, the usual place first."""
    yield state_file()
    for note in _notes().glob("*.txt"):
        yield Path(note.read_text())


def _notes() -> Path:
    """Notes of state files elsewhere than in the cache, one by port."""
    return cache_folder() / "clusters"


def _note(cluster: Cluster) -> Path:
    return _notes() / f"{_split(cluster.address)[1]}.txt"


def node_command(
    port: int, *, head: bool, cpus: int, attack: int, folder: Path | None = None
) -> list[str]:
    """The command of one node; ``folder`` is for the head, from which the others learn it."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start"]
    if head:
        command += ["--head", f"--port={port}", "--include-dashboard=false"]
        # By default one fixed port: the head of a second cluster would fail on it.
        command += [f"--temp-dir={folder}", f"--ray-client-server-port={free_ports(1)[0]}"]
    else:
        command += [f"--address={LOOPBACK}:{port}"]
    return [
        *command,
        f"--node-ip-address={LOOPBACK}",
        f"--num-cpus={cpus}",
        f"--resources={json.dumps({ATTACK_RESOURCE: attack})}",
        "--disable-usage-stats",
        "--block",
    ]


def start(
    file: Path,
    *,
    nodes: int = 1,
    cpus: int | None = None,
    attack: int = 1,
    port: int | None = None,
    seconds: float = 90,
) -> Cluster:
    """Start the nodes and wait until all of them have joined."""
    if (known := read(file)) is not None and running(known):
        raise RunError(
            f"a cluster at {known.address} is up already; end it with `fedsim cluster down`, "
            f"or give this one another --state."
        )
    stop(file)  # what is left of one that died
    port = port or free_ports(1)[0]
    folder = folders.make()
    cluster = Cluster(f"{LOOPBACK}:{port}", str(folder), ())
    try:
        for number in range(nodes):
            command = node_command(
                port,
                head=number == 0,
                cpus=_cpus(cpus),
                attack=attack,
                folder=folder,
            )
            node = _spawn(command, folder / f"node-{number}.log")
            cluster = Cluster(cluster.address, cluster.folder, (*cluster.nodes, node))
            write_json(file, asdict(cluster))  # at once: a start that is cut short can be ended
            if number == 0:
                folders.give(folder, node)
                write_atomically(_note(cluster), str(file.absolute()).encode())
                _await_port(cluster, seconds)
        _await(cluster, nodes, seconds)
    except BaseException:
        stop(file)
        folders.remove(folder)  # of a node that never came up, nothing is written down
        raise
    return cluster


def add(file: Path, *, cpus: int | None = None, attack: int = 1, seconds: float = 90) -> Cluster:
    """Add a node to a cluster that is up."""
    cluster = read(file)
    if cluster is None or not running(cluster):
        raise RunError("there is no cluster to add a node to; start one: `fedsim cluster up`.")
    if not folders.is_ours(Path(cluster.folder)):
        raise _damaged(file)
    port = _split(cluster.address)[1]
    command = node_command(port, head=False, cpus=_cpus(cpus), attack=attack)
    before = {node["id"] for node in answering(cluster.address)}
    node = _spawn(command, Path(cluster.folder) / f"node-{len(cluster.nodes)}.log")
    cluster = Cluster(cluster.address, cluster.folder, (*cluster.nodes, node))
    write_json(file, asdict(cluster))
    _await(cluster, 1, seconds, known=before)  # a node that just died may still be counted
    return cluster


def stop(file: Path) -> int:
    """End what the state file names and nothing else; returns how many nodes were still up.

    A folder goes only if it is a Ray's of ours: the file may be anybody's.
    """
    cluster = read(file)
    if cluster is None:
        return 0
    up = running(cluster)
    for node in reversed(up):  # the head last: the others would complain of its absence
        end(node, 5)
    folder = Path(cluster.folder)
    if ours := folders.is_ours(folder):
        folders.remove(folder)
    _note(cluster).unlink(missing_ok=True)
    file.unlink(missing_ok=True)
    if not ours and os.path.lexists(folder):
        raise RunError(
            f"the state file '{file}' named '{folder}', which is no folder of a cluster of yours "
            f"here: it is left as it is."
        )
    return len(up)


def read(file: Path) -> Cluster | None:
    """What the state file says, or None where there is none."""
    try:
        content = read_json(file, links=True)
        nodes = tuple(Child.read(node) for node in content["nodes"])
        address, folder = str(content["address"]), str(content["folder"])
        host, port = _split(address)
        if host != LOOPBACK or not 0 < port < 2**16 or "\0" in folder:
            raise ValueError(f"{address} is no address of ours")
        return Cluster(address, folder, nodes)
    except FileNotFoundError:
        return None
    except (DamagedError, ValueError, KeyError, TypeError) as error:
        raise _damaged(file) from error


def _damaged(file: Path) -> RunError:
    return RunError(
        f"the state file '{file}' is damaged; look for `ray start` among the processes, end those "
        f"that are yours, and delete it."
    )


def running(cluster: Cluster) -> list[Child]:
    """The nodes whose processes live."""
    return [node for node in cluster.nodes if node.lives]


def answering(address: str, seconds: float = 8) -> list[dict[str, Any]]:
    """The nodes that the cluster itself counts as alive, each with its id and its resources.

    Asked in a process of its own: this one may be connected elsewhere.
    """
    code = (
        "import json, sys, ray\n"
        "ray.init(address=sys.argv[1], log_to_driver=False, logging_level='CRITICAL')\n"
        "print(json.dumps([{'id': n['NodeID'], 'resources': n['Resources']} "
        "for n in ray.nodes() if n['Alive']]))\n"
    )
    try:
        with socket.create_connection(_split(address), timeout=seconds):
            pass
        answer = subprocess.run(
            [sys.executable, "-c", code, address],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=_environment(),
        )
        nodes: list[dict[str, Any]] = json.loads(answer.stdout.splitlines()[-1])
        return nodes
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []


def _cpus(wanted: int | None) -> int:
    return (os.cpu_count() or 1) if wanted is None else wanted


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _environment() -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    path = os.pathsep.join(p for p in sys.path if p)
    return {**os.environ, **quiet, **authentication.settings(), "PYTHONPATH": path}


def _spawn(command: list[str], log: Path) -> Child:
    return child_of(spawn(command, log, _environment()))


def _await_port(cluster: Cluster, seconds: float) -> None:
    """Wait until the head listens, so that the others find it."""
    for _ in tries(seconds):
        _refuse_ended(cluster)
        with contextlib.suppress(OSError):
            socket.create_connection(_split(cluster.address), timeout=1).close()
            return
    raise RunError(f"the head of the Ray cluster was not up within {seconds:.0f} s.")


def _await(cluster: Cluster, count: int, seconds: float, *, known: Collection[str] = ()) -> None:
    """Wait until ``count`` nodes have joined beside the known ones."""
    for _ in tries(seconds):
        _refuse_ended(cluster)
        if sum(node["id"] not in known for node in answering(cluster.address)) >= count:
            return
    raise RunError(f"only some of {count} Ray nodes came up within {seconds:.0f} s.")


def _refuse_ended(cluster: Cluster) -> None:
    """A node that just started and is gone says why in its log."""
    if cluster.nodes[-1] not in running(cluster):
        log = Path(cluster.folder) / f"node-{len(cluster.nodes) - 1}.log"
        raise RunError(f"a Ray node ended as it started: {last_words(log)}")

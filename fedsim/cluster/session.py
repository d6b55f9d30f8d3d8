"""Session: a Ray to work on, one of this process's own or a cluster that is up already."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedsim.cluster import authentication, folders
from fedsim.cluster.local import ATTACK_RESOURCE, read, running, started_here, state_file
from fedsim.core.errors import RunError
from fedsim.core.spec import EngineSpec

JOINING_SECONDS = 60.0  # how long a run waits for a first node with room for attacks


def _address(given: str) -> str:
    """Where a spec's cluster is; `auto` is the one that `fedsim cluster up` started here."""
    if given != "auto":
        return given
    cluster = read(state_file())
    if cluster is not None and running(cluster):
        return cluster.address
    # Ray's own search would try for minutes an address that some Ray once left in a file.
    raise RunError("no cluster is up here; start one with `fedsim cluster up`, or give host:port")


def _settings(address: str | None) -> dict[str, str]:
    """The environment in which Ray lets us in; fails at once where Ray would try for minutes."""
    if address is None:
        return authentication.settings()
    _knock(address)
    return authentication.settings_for(address, ours=started_here(address))


def _knock(address: str) -> None:
    """Raise where nobody listens."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise RunError("an address is host:port")
    socket.create_connection((host, int(port)), timeout=5).close()


def refuse_silence(engine: EngineSpec) -> None:
    """Raise for a cluster that does not answer, before anything slow is done."""
    if engine.kind == "ray" and engine.address:
        with _told(engine):
            _knock(_address(engine.address))


def own_version() -> str:
    return version("fedsim")


def worker_gpus(engine: EngineSpec) -> float:
    """The share of a GPU that each attack worker takes."""
    there = float(ray.cluster_resources().get("GPU", 0))
    if engine.gpus_per_worker is None:
        return min(1, there / engine.attack_workers) if there else 0
    if engine.gpus_per_worker > there:
        raise RunError(
            f"engine.gpus_per_worker is {engine.gpus_per_worker:g} but Ray offers {there:g} GPUs; "
            f"leave it out, or start nodes with --num-gpus."
        )
    return engine.gpus_per_worker


def _refuse_other_versions() -> None:
    """One fedsim on every node: another version would read jobs and specs differently."""

    def installed() -> str:  # nested, so that it is sent by value and needs no fedsim there
        from importlib import metadata

        try:
            return metadata.version("fedsim")
        except metadata.PackageNotFoundError:
            return "none"

    for name, theirs in _asked(installed, ray.nodes()):
        refuse_version(theirs, name)


def refuse_blind_clients(folder: Path) -> None:
    """Raise where a node with room for clients does not see the folder that keeps their truth."""
    with NamedTemporaryFile(dir=folder.absolute(), prefix=".seen-") as file:
        path = file.name

        def visible() -> bool:
            import os

            return os.path.exists(path)

        answers = _asked(visible, [node for node in ray.nodes() if node["Resources"].get("CPU")])
    for name, answer in answers:
        if not answer:
            raise RunError(
                f"the Ray node {name} has room for clients, but does not see '{folder}', where "
                f"they keep their truth; share that disk with it, or start it with --num-cpus=0."
            )


def _asked(question: Callable[[], Any], nodes: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """What each of these nodes answers, with its name."""
    pending = [
        (
            node,
            ray.remote(question)
            .options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            )
            .remote(),
        )
        for node in nodes
        if node["Alive"]
    ]
    answers = []
    for node, answer in pending:
        name = node["NodeManagerAddress"]
        try:
            answers.append((name, ray.get(answer, timeout=60)))
        except ray.exceptions.RayError as error:
            if still_up([node["NodeID"]]):
                reason = type(error).__name__
                raise RunError(
                    f"the Ray node {name} runs no task ({reason}); see its logs."
                ) from error
    return answers


def refuse_version(theirs: str, where: str) -> None:
    """One fedsim everywhere."""
    ours = own_version()
    if theirs != ours:
        raise RunError(
            f"the Ray node {where} has fedsim {theirs} and this process {ours}; install the same "
            f"version on every node and start it again."
        )


def still_up(nodes: list[str], seconds: float = 15) -> list[str]:
    """The nodes that still live; a node's death is known a little later than its workers'."""
    end = time.monotonic() + seconds
    while True:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        up = [node for node in nodes if node in alive]
        if len(up) < len(nodes) or time.monotonic() > end:
            return up
        time.sleep(0.5)


@contextmanager
def ray_session(engine: EngineSpec) -> Iterator[None]:
    """Ray with room for attack workers beside Flower's clients."""
    if ray.is_initialized():
        yield
        return
    with ExitStack() as stack:
        with _told(engine):
            address = _address(engine.address) if engine.address else None
            stack.enter_context(authentication.applied(_settings(address)))
            folder = None if address else stack.enter_context(folders.kept())
            stack.callback(ray.shutdown)
            _connect(address, folder, engine)
        if not _attack_room(JOINING_SECONDS if engine.address else 0.0):
            raise RunError(
                f"the Ray cluster at '{engine.address}' offers no '{ATTACK_RESOURCE}' resource "
                f"after {JOINING_SECONDS:.0f} s; start a node with "
                f"--resources='{{\"{ATTACK_RESOURCE}\": 1}}'."
            )
        if engine.address:
            _refuse_other_versions()
        yield


def _attack_room(seconds: float) -> bool:
    """Whether there is room for attack workers, or will be soon: a node that was started with the
    others may join a little later."""
    end = time.monotonic() + seconds
    while not ray.cluster_resources().get(ATTACK_RESOURCE):
        if time.monotonic() >= end:
            return False
        time.sleep(0.5)
    return True


@contextmanager
def _told(engine: EngineSpec) -> Iterator[None]:
    """Report whatever goes wrong with Ray in one sentence."""
    try:
        yield
    except Exception as error:
        where = f"at '{engine.address}'" if engine.address else "on this machine"
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise RunError(f"Ray {where} cannot be used: {reason}.") from error


def _connect(address: str | None, folder: Path | None, engine: EngineSpec) -> None:
    # Processes begin with one thread each, which waits without spinning.
    environment = {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "TQDM_DISABLE": "1",
    }
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "runtime_env": {"env_vars": environment},
    }
    if address is None:
        options |= {
            "num_cpus": engine.cpus or os.cpu_count(),
            "resources": {ATTACK_RESOURCE: engine.attack_workers},
            "include_dashboard": False,
            "_temp_dir": str(folder),
        }
    handler = signal.getsignal(signal.SIGTERM)
    # Without an address, Ray would join any cluster on this machine.
    ray.init(address=address or "local", **options)
    # Ray's own makes an exit of it, without a word and at any place.
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)

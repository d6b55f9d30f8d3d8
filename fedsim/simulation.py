"""Engines: the same federation in this process, or on Flower's simulation runtime over Ray."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import grpc
import ray
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from clients.app import ClientSide, make_client_app
from fedsim.core.errors import RunError
from fedsim.core.spec import EngineSpec, Spec
from fedsim.core.store import Run
from fedsim.grids import InlineGrid
from fedsim.server import AdversarialStrategy

ServerMain = Callable[[Grid], None]
ATTACK_RESOURCE = "attack"


def run_federation(
    spec: Spec,
    run: Run,
    strategy: AdversarialStrategy,
    initial: dict[str, Any],
    *,
    afterwards: Callable[[], None] = lambda: None,
) -> None:
    """Do the rounds that are missing, then ``afterwards``, while the engine is still up."""
    side = ClientSide(spec, run.vault.absolute())

    def main(grid: Grid) -> None:
        strategy.run_rounds(grid, initial)
        afterwards()

    app = make_client_app(lambda context: side)
    quiet_flower()
    if spec.engine.kind == "inline":
        main(InlineGrid(app, spec.data.clients))
    else:
        _simulate(spec, app, main, strategy.stop)


def _simulate(spec: Spec, app: ClientApp, main: ServerMain, stop: threading.Event) -> None:
    from flwr.simulation import run_simulation

    server = ServerApp()
    failures: list[BaseException] = []

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        # Kept aside: the runtime would print a traceback of an error meant for the user.
        try:
            main(grid)
        except BaseException as error:
            failures.append(error)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_simulation(
                server,
                app,
                num_supernodes=spec.data.clients,
                backend_config={
                    "client_resources": {
                        "num_cpus": 1,
                        "num_gpus": float(spec.engine.client_gpus),
                        "max_restarts": -1,  # a killed actor would fail every later message
                    }
                },
            )
    except KeyboardInterrupt:
        stop.set()
        raise
    if failures:
        raise failures[0]


def _knock(address: str, seconds: float = 5) -> None:
    """Fail at once where nobody listens, or something else than Ray: Ray would try for minutes."""
    if address == "auto":
        return  # Ray looks for one on this machine
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("an address is host:port")
    socket.create_connection((host, int(port)), timeout=seconds).close()
    if address.startswith("ray://"):
        return
    channel = grpc.insecure_channel(f"{host}:{port}")
    try:
        grpc.channel_ready_future(channel).result(timeout=seconds)
    except grpc.FutureTimeoutError:
        raise TimeoutError("what listens there is no Ray") from None
    finally:
        channel.close()


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


def _refuse_other_versions(address: str) -> None:
    """Ask every node for its fedsim: another one would read jobs and specs otherwise."""

    def installed() -> str:  # inside: sent by value, so that it needs no fedsim over there
        from importlib import metadata

        try:
            return metadata.version("fedsim")
        except metadata.PackageNotFoundError:
            return "none"

    asked = {
        ray.remote(installed)
        .options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        .remote(): node
        for node in ray.nodes()
        if node["Alive"]
    }
    for answer, node in asked.items():
        try:
            theirs = ray.get(answer, timeout=60)
        except ray.exceptions.RayError as error:
            where = f"the node {node['NodeManagerAddress']} of the Ray cluster at '{address}'"
            reason = type(error).__name__
            raise RunError(f"{where} runs no task ({reason}); see its logs.") from error
        refuse_version(theirs, node["NodeManagerAddress"])


def refuse_version(theirs: str, where: str) -> None:
    """One fedsim everywhere."""
    ours = own_version()
    if theirs != ours:
        raise RunError(
            f"the Ray node {where} has fedsim {theirs} and this process {ours}; install the same "
            f"version on every node and start it again."
        )


@contextmanager
def ray_session(engine: EngineSpec) -> Iterator[None]:
    """Ray with room for attack workers beside Flower's clients."""
    if ray.is_initialized():
        yield
        return
    # The rank of a worker's threads decides nothing: one each, waiting without spinning.
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
    try:
        if engine.address:
            _knock(engine.address)
            ray.init(address=engine.address, **options)
        else:
            ray.init(
                address="local",  # else it would join any cluster that this machine has
                num_cpus=engine.cpus or os.cpu_count(),
                resources={ATTACK_RESOURCE: engine.attack_workers},
                include_dashboard=False,
                **options,
            )
    except Exception as error:
        where = f"at '{engine.address}'" if engine.address else "on this machine"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"Ray {where} cannot be used: {reason}") from error
    if not ray.cluster_resources().get(ATTACK_RESOURCE):
        ray.shutdown()
        raise RunError(
            f"the Ray cluster at '{engine.address}' offers no '{ATTACK_RESOURCE}' resource; start "
            f"a node with --resources='{{\"{ATTACK_RESOURCE}\": 1}}'."
        )
    try:
        if engine.address:
            _refuse_other_versions(engine.address)
        yield
    finally:
        ray.shutdown()


def quiet_flower() -> None:
    """Flower's own log would break into our progress bars; failures reach the run's events."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)

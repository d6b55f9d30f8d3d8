"""Engines: the same federation in this process, or on Flower's simulation runtime over Ray."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# Both read these when they are first imported.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault(
    "FLWR_HOME", os.path.join(tempfile.gettempdir(), f"fedsim-flwr-{os.getuid()}")
)
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.task_identity import TaskIdentity

from clients.app import ClientSide, make_client_app
from fedsim.core.errors import RunError
from fedsim.core.spec import EngineSpec, Spec
from fedsim.core.store import Run
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
            ray.init(address=engine.address, **options)
        else:
            ray.init(
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
        yield
    finally:
        ray.shutdown()


class InlineGrid(Grid):
    """A grid that runs each client in this process, when its reply is asked for.

    For tests and breakpoints. Flower offers no public way to do this: the identity of the task
    and the message ids, which its runtime sets, are set here under their private names.
    """

    def __init__(self, app: ClientApp, clients: int):
        self.app = app
        self.contexts = {
            client + 1: Context(
                run_id=1,
                node_id=client + 1,
                node_config={"partition-id": client, "num-partitions": clients},
                state=RecordDict(),
                run_config={},
            )
            for client in range(clients)
        }
        self.waiting: dict[str, Message] = {}
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    def set_run(self, run: Any) -> None:
        raise RunError("the in-process grid has no other runs.")

    @property
    def run(self) -> Any:
        raise RunError("the in-process grid has no run of Flower's.")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise RunError("make messages with the Message class.")

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = []
        for message in messages:
            name = uuid.uuid4().hex
            message.metadata.__dict__["_message_id"] = name
            self.waiting[name] = message
            pushed.append(name)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        for name in list(message_ids):
            if name in self.waiting:
                yield self._answer(self.waiting.pop(name))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        context = self.contexts[message.metadata.dst_node_id]
        try:
            return self.app(message, context)
        except Exception as error:  # as a client's error is to the server: a reply
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def quiet_flower() -> None:
    """Flower's own log would break into our progress bars; failures reach the run's events."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)

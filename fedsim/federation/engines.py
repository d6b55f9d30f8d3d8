"""Engines: the same federation in this process, or on Flower's simulation runtime over Ray."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsim.clients.app import ClientSide, make_client_app
from fedsim.cluster.session import refuse_blind_clients
from fedsim.core.run import Run
from fedsim.core.spec import Spec
from fedsim.core.vault import Vault
from fedsim.federation.grids import InlineGrid
from fedsim.federation.strategy import AdversarialStrategy

ServerMain = Callable[[Grid], None]


def run_federation(
    spec: Spec,
    run: Run,
    strategy: AdversarialStrategy,
    initial: dict[str, Any],
    *,
    afterwards: Callable[[], None] = lambda: None,
) -> None:
    """Do the rounds that are missing, then ``afterwards``, while the engine is still up."""
    # In hand: a client on another node sees the vault, and not this user's folder of keys.
    side = replace(ClientSide(spec, run.vault.absolute()), key=Vault(run.vault).keys.own())

    def main(grid: Grid) -> None:
        strategy.run_rounds(grid, initial)
        afterwards()

    app = make_client_app(lambda context: side)
    quiet_flower()
    if spec.engine.kind == "inline":
        main(InlineGrid(app, spec.data.clients))
    else:
        if spec.engine.address:
            refuse_blind_clients(run.root)
        _simulate(spec, app, main, strategy.stop)


def _simulate(spec: Spec, app: ClientApp, main: ServerMain, stop: threading.Event) -> None:
    from flwr.simulation import run_simulation

    server = ServerApp()
    failures: list[BaseException] = []

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        # Set aside: the runtime would print a traceback of an error meant for the user.
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


def quiet_flower() -> None:
    """Flower's own log would break into our progress bars; failures reach the run's events."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)

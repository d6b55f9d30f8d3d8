"""The two apps of ``[tool.flwr.app]``, for Flower's own launcher: rounds and observations.

Their spec and output directory come from Flower's run config. Attack afterwards with
``fedsim audit --resume OUTPUT``.
"""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from clients.app import ClientSide, make_client_app
from fedsim.core.spec import Spec, load_spec
from fedsim.core.store import Run
from fedsim.planning import observed_rounds, prepare
from fedsim.server import AdversarialStrategy, create_strategy


def _spec(context: Context) -> Spec:
    path = Path(str(context.run_config["spec"]))
    if not path.is_file():  # Flower runs an app from a folder of its own
        path = Path(__file__).parent.parent / path
    return load_spec(path)


def _output(context: Context) -> Path:
    return Path(str(context.run_config["output"])).absolute()


client = make_client_app(lambda context: ClientSide(_spec(context), _output(context) / "vault"))
server = ServerApp()


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Every round of the spec, captured."""
    plan = prepare(_spec(context))
    root = _output(context)
    with Run(root).locked():
        strategy = AdversarialStrategy(
            create_strategy(plan.spec),
            plan.spec,
            Run.create(root, plan.spec, deployed=True),
            plan.public,
            rounds=observed_rounds(plan.spec),
        )
        strategy.run_rounds(grid, plan.initial)

"""The two apps of ``[tool.flwr.app]``, for Flower's own launcher: rounds and observations.

Their spec and output directory come from Flower's run config, a SuperNode's own spec, vault and
pictures from its node config. With ``public`` in the run config (what `fedsim deal` wrote for the
server), the server opens no data set. With ``attack`` in the run config, the server attacks what it
captured once the rounds are done; scoring is for whoever has the vaults (``fedsim score``).
"""

from __future__ import annotations

from logging import ERROR
from pathlib import Path

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from fedsim.audit.stages import attack_captured
from fedsim.campaign.plan import observed_rounds, prepare
from fedsim.clients import ClientSide, DeployedSide, make_client_app, read_public, read_tested
from fedsim.core.errors import FedsimError
from fedsim.core.run import Run, paths
from fedsim.core.spec import Spec, load_spec
from fedsim.deploy.flower import TOLD
from fedsim.federation.aggregation import create_strategy
from fedsim.federation.strategy import AdversarialStrategy


def _spec(context: Context) -> Spec:
    path = Path(str(context.node_config.get("spec") or context.run_config["spec"]))
    if not path.is_file():  # Flower runs an app from a folder of its own
        path = Path(__file__).parents[2] / path
    return load_spec(path)


def _output(context: Context) -> Path:
    return Path(str(context.run_config["output"])).absolute()


def _side(context: Context) -> ClientSide:
    """What runs here is no simulation, whatever the server says: the client's secrets are its own,
    and so is the key of its vault, which lies beside that."""
    vault, data = context.node_config.get("vault"), context.node_config.get("data")
    return DeployedSide(
        _spec(context),
        Path(str(vault)) if vault else Run(_output(context)).vault,
        Path(str(data)) if data else None,
        keys=Path(str(vault)).absolute().parent / paths.VAULT_KEYS if vault else None,
    )


client = make_client_app(_side)
server = ServerApp()


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Every round of the spec, captured."""
    try:
        _serve(grid, context)
    except FedsimError as error:  # Flower logs a traceback; its reader wants the sentence
        log(ERROR, "%s%s", TOLD, error)
        raise


def _serve(grid: Grid, context: Context) -> None:
    spec, root = _spec(context), _output(context)
    public = context.run_config.get("public")
    classes = read_public(Path(str(public)), spec) if public else None
    tested = read_tested(Path(str(public)), spec) if public else None
    plan = prepare(spec, classes)
    with Run(root).locked():
        strategy = AdversarialStrategy(
            create_strategy(plan.spec),
            plan.spec,
            Run.create(root, plan.spec, deployed=True, classes=classes),
            plan.public,
            rounds=observed_rounds(plan.spec),
            active=plan.active(at_hand=classes is None),
            tested=tested,
        )
        strategy.run_rounds(grid, plan.initial)
    if context.run_config.get("attack"):
        attack_captured(root, trust=True)  # of the spec that it was started with

"""The apps that Flower's own launcher starts: the same rounds, from Flower's run config."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pandas as pd
from flwr.app import Context, RecordDict

from fedsim.clients import DeployedSide
from fedsim.core.run import Run
from fedsim.deploy import apps
from fedsim.federation.grids import InlineGrid
from tests.conftest import small_spec


def test_flower_finds_the_apps_where_pyproject_says() -> None:
    root = Path(__file__).parents[2]
    app = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["components"] == {
        "serverapp": "fedsim.deploy.apps:server",
        "clientapp": "fedsim.deploy.apps:client",
    }
    assert (root / app["config"]["spec"]).is_file()


def test_the_apps_run_the_spec_of_the_run_config(
    small_run: Run, tmp_path: Path, as_simulated: None
) -> None:
    spec = small_spec()
    (tmp_path / "spec.yaml").write_text(spec.to_yaml())
    config = {"spec": str(tmp_path / "spec.yaml"), "output": str(tmp_path / "run")}
    grid = InlineGrid(apps.client, spec.data.clients)
    for context in grid.contexts.values():
        context.run_config = config
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
    apps.server(grid, context)
    columns = ["round", "clients", "train_loss", "bytes"]
    pd.testing.assert_frame_equal(
        Run.open(tmp_path / "run").rounds[columns], small_run.rounds[columns]
    )


def test_the_client_app_is_no_simulation_whatever_the_server_says(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(small_spec().to_yaml())
    told = {"spec": str(tmp_path / "spec.yaml"), "output": str(tmp_path / "run")}
    told |= {
        "simulated": True,
        "secret": 1,
        "seed": 1,
        "key": "x",
        "keys": str(tmp_path / "theirs"),
    }
    own = {"vault": str(tmp_path / "node" / "vault"), "partition-id": 2}
    context = Context(run_id=1, node_id=5, node_config=own, state=RecordDict(), run_config=told)
    side = apps._side(context)
    assert isinstance(side, DeployedSide)
    assert side.secret(1, 2) != side.secret(1, 2)
    assert side.opened().keys.folders == (tmp_path / "node" / "vault-keys",)

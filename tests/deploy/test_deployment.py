"""Real deployments: command lines, bad input, and federations over TLS on loopback."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from flwr.app import Context, RecordDict
from typer.testing import CliRunner

from fedsim.audit.stages import attack_captured, audit, conclude
from fedsim.cli import app
from fedsim.clients.shards import images_of, shards_of
from fedsim.core.errors import FedsimError, RunError, SpecError
from fedsim.core.files import read_json, write_json
from fedsim.core.run import Run
from fedsim.core.spec import Spec
from fedsim.deploy import apps, deployment
from fedsim.deploy.deployment import (
    Deployment,
    Node,
    check_deployable,
    deploy,
    gather,
    lay_out,
    plan_deployment,
    started,
    superlink_command,
    supernode_command,
)
from fedsim.deploy.flower import Processes, call, found, register_command, run_command
from fedsim.deploy.keys import Keys, make_keys
from fedsim.federation.checkpoint import read_checkpoint
from fedsim.federation.grids import InlineGrid
from tests.conftest import small_spec
from tests.deploy.conftest import alive, assert_none_alive
from tests.layouts import make_tree

SCORES = ["round", "client", "attack", "image", "mse", "psnr", "ssim", "label_true", "canary"]


def noisy_spec(clients: int, *overrides: str) -> Spec:
    """Clients whose own noise decides the scores: equal ones mean the same client did it."""
    everyone = f"data.clients={clients}", f"train.clients_per_round={clients}"
    return small_spec(*everyone, "defenses=[{name: gaussian_noise, std: 0.001}]", *overrides)


@pytest.fixture
def planned(tmp_path: Path) -> Deployment:
    return plan_deployment(tmp_path / "d", 2, make_keys(tmp_path / "keys", 2))


def test_a_deployment_is_encrypted_and_authenticated_unless_told_otherwise(
    planned: Deployment,
) -> None:
    server = superlink_command(planned)
    assert {"--ssl-certfile", "--ssl-keyfile", "--enable-supernode-auth"} <= set(server)
    for node in planned.nodes:
        command = supernode_command(planned, node)
        assert {"--root-certificates", "--auth-supernode-private-key"} <= set(command)
        assert "--insecure" not in command + server
    bare = replace(planned, keys=None)
    assert "--insecure" in superlink_command(bare)
    assert "--insecure" in supernode_command(bare, bare.nodes[0])


@pytest.mark.parametrize("secure", [True, False])
def test_everything_listens_on_loopback_alone(planned: Deployment, secure: bool) -> None:
    one = planned if secure else replace(planned, keys=None)
    for command in (superlink_command(one), supernode_command(one, one.nodes[1])):
        assert command[command.index("--host") + 1] == "127.0.0.1"
    ports = [one.port, *(node.port for node in one.nodes)]
    assert len(set(ports)) == 3


def test_a_node_is_told_of_its_own_folders_and_the_server_of_none(planned: Deployment) -> None:
    lay_out(planned, small_spec("data.clients=2"))
    first, second = planned.nodes
    told = " ".join(supernode_command(planned, first))
    assert "partition-id=0" in told
    assert f'vault="{first.vault}" data="{first.data}"' in told
    assert str(second.root) not in told
    submitted = run_command(planned.app, planned.spec, planned.public, planned.run)
    for command in (superlink_command(planned), submitted):
        assert "vault" not in " ".join(command)
        assert str(planned.root / "nodes") not in " ".join(command)
    assert planned.server not in first.vault.parents
    assert {folder.stat().st_mode & 0o777 for folder in (first.root, first.data)} == {0o700}
    assert "astronaut" not in planned.public.read_text(), "the names of classes may be people's"


def test_a_clients_own_defenses_are_kept_when_the_deployment_goes_on(planned: Deployment) -> None:
    spec = small_spec("data.clients=2")
    lay_out(planned, spec)
    own = small_spec("data.clients=2", "defenses=[{name: sign}]").to_yaml()
    planned.nodes[0].spec.write_text(own)
    lay_out(planned, spec)
    assert planned.nodes[0].spec.read_text() == own
    assert planned.nodes[1].spec.read_text() == spec.to_yaml()
    other = small_spec("data.clients=2", "seed=5")
    lay_out(planned, other)
    assert planned.spec.read_text() == planned.nodes[1].spec.read_text() == other.to_yaml()
    assert planned.nodes[0].spec.read_text() == own


def _federated_here(planned: Deployment) -> Run:
    """The apps of a deployment in this process, as Flower would start them."""
    config = {
        "spec": str(planned.spec),
        "public": str(planned.public),
        "output": str(planned.run),
        "attack": True,
    }
    grid = InlineGrid(apps.client, len(planned.nodes))
    for context, node in zip(grid.contexts.values(), planned.nodes, strict=True):
        context.run_config = config
        own = {"vault": str(node.vault), "data": str(node.data), "spec": str(node.spec)}
        context.node_config |= own
    apps.server(grid, Context(1, 0, {}, RecordDict(), config))
    return Run.open(planned.run)


def test_a_node_uses_its_own_vault_and_defenses_and_the_server_attacks_without_a_vault(
    tmp_path: Path,
) -> None:
    planned = plan_deployment(tmp_path / "d", 2, None)
    lay_out(planned, small_spec("data.clients=2", "train.rounds=1"))
    honest, other = planned.nodes
    other.spec.write_text(
        small_spec(
            "data.clients=2", "train.rounds=1", "defenses=[{name: gaussian_noise, std: 0.1}]"
        ).to_yaml()
    )
    run = _federated_here(planned)
    assert not run.vault.exists()
    assert [len(list(n.vault.rglob("*.safetensors"))) for n in planned.nodes] == [1, 1]
    assert list(run.reconstructions.rglob("*.safetensors"))
    gather(run, [honest.vault, other.vault])
    conclude(run)
    canaries = run.scores.groupby("client")["canary"].max()
    assert canaries[0] < 1e-4 < canaries[1], "what a client does not announce is found"


def test_neither_server_nor_clients_need_the_data_set(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    (tree / "class-0" / "person-0" / "damaged.png").write_bytes(b"nothing")
    named = f"data={{name: imagefolder, path: {tree}, image_size: 32, clients: 2}}"
    spec = small_spec(named, "train={rounds: 1, lr: 0.05}")
    planned = plan_deployment(tmp_path / "d", 2, None)
    lay_out(planned, spec)
    tree.rename(tmp_path / "away")
    for cached in (images_of, shards_of):
        cached.cache_clear()
    run = _federated_here(planned)
    assert not run.events()
    (tmp_path / "away").rename(tree)  # whoever scores has it: the gallery is made from it
    gather(run, [node.vault for node in planned.nodes])
    conclude(run)
    assert [event["kind"] for event in run.events()] == ["pictures_skipped"]
    simulated = audit(spec, tmp_path / "simulated")
    pd.testing.assert_frame_equal(run.scores[SCORES], simulated.scores[SCORES])
    columns = ["round", "clients", "failed", "train_loss", "test_loss", "test_accuracy"]
    pd.testing.assert_frame_equal(run.rounds[columns], simulated.rounds[columns])


def test_a_client_without_its_pictures_fails_in_one_sentence(tmp_path: Path) -> None:
    planned = plan_deployment(tmp_path / "d", 2, None)
    lay_out(planned, small_spec("data.clients=2", "train.rounds=1"))
    first, second = planned.nodes
    shutil.rmtree(first.data)
    second.data.rename(first.data)
    run = _federated_here(replace(planned, nodes=(first, replace(second, root=first.root))))
    (event,) = run.events()
    assert "dealt to client 1, and this is client 0" in event["message"]
    assert "\n" not in event["message"]


def test_what_was_dealt_is_kept_when_the_deployment_goes_on(planned: Deployment) -> None:
    spec = small_spec("data.clients=2")
    lay_out(planned, spec)
    files = [file for node in planned.nodes for file in node.data.iterdir()]
    before = [file.stat().st_mtime_ns for file in files]
    lay_out(planned, spec)
    assert [file.stat().st_mtime_ns for file in files] == before


def test_a_threat_that_grants_the_truth_cannot_be_deployed() -> None:
    with pytest.raises(SpecError, match="oracle_labels"):
        check_deployable(small_spec("threat={model: C, oracle_labels: true}"))


def test_a_deployment_with_the_wrong_certificate_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, other = make_keys(tmp_path / "one", 2), make_keys(tmp_path / "other", 2)
    shutil.copy(other.authority, keys.authority)

    def start(self: Processes, name: str, command: list[str], folder: Path) -> None:
        pytest.fail(f"the {name} was started")

    monkeypatch.setattr(Processes, "start", start)
    with pytest.raises(RunError, match="was not signed by") as caught:
        deploy(small_spec("data.clients=2"), tmp_path / "d", keys=keys.root)
    assert "\n" not in str(caught.value)


def test_a_deployment_that_is_under_way_is_left_alone(tmp_path: Path) -> None:
    under_way = Run(tmp_path / "d")
    with under_way.locked(), pytest.raises(RunError, match="another process"):
        deploy(small_spec("data.clients=2"), under_way.root, insecure=True)


def _deployed_copy(run: Run, root: Path) -> tuple[Run, list[Path]]:
    """A finished run as a deployment leaves it: unscored, the vault in parts elsewhere."""
    copy = Run(shutil.copytree(run.root, root / "run"))
    vaults = []
    for client in range(run.spec.data.clients):
        files = list(copy.vault.rglob(f"client-*{client}.safetensors"))
        for file in files:
            target = root / f"vault-{client}" / file.relative_to(copy.vault)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(file, target)
        if files:
            vaults.append(root / f"vault-{client}")
    shutil.rmtree(copy.vault)
    for name in ("scores.csv", "scores.parquet", "summary.json", "canaries.json"):
        (copy.root / name).unlink()
    write_json(copy.root / "run.json", read_json(copy.root / "run.json") | {"deployed": True})
    return copy, vaults


def test_vaults_gathered_afterwards_give_the_same_scores(small_run: Run, tmp_path: Path) -> None:
    run, vaults = _deployed_copy(small_run, tmp_path)
    with pytest.raises(RunError, match="gather their vaults"):
        conclude(run)
    words = ["score", str(run.root), *(f"--vault={vault}" for vault in vaults)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert run.vault.stat().st_mode & 0o777 == 0o700
    pd.testing.assert_frame_equal(run.scores[SCORES], small_run.scores[SCORES])


def test_vaults_that_are_none_or_say_the_same_are_refused(small_run: Run, tmp_path: Path) -> None:
    run, vaults = _deployed_copy(small_run, tmp_path)
    with pytest.raises(RunError, match="is no vault"):
        gather(run, [tmp_path / "nowhere"])
    again = shutil.copytree(vaults[0], tmp_path / "again")
    with pytest.raises(RunError, match="both the truth of the same client"):
        gather(run, [vaults[0], again])
    assert not run.vault.exists()


def test_missing_rounds_of_clients_elsewhere_are_not_simulated(
    small_run: Run, tmp_path: Path
) -> None:
    run, _ = _deployed_copy(small_run, tmp_path)
    run.checkpoint.unlink()
    for again in (lambda: attack_captured(run.root), lambda: audit(run.spec, run.root)):
        with pytest.raises(RunError, match="go on with the `fedsim deploy`"):
            again()
    assert not run.vault.exists()


def _traced(command: list[str], log: Path) -> list[str]:
    flower = found(command)
    return ["strace", "-f", "-qq", "-e", "trace=openat,open,rename,link", "-o", str(log), *flower]


@pytest.mark.slow
def test_a_deployment_over_tls_gives_the_scores_of_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, node = tmp_path / "server.txt", tmp_path / "node.txt"

    def traced_node(planned: Deployment, one: Node) -> list[str]:
        command = supernode_command(planned, one)
        return _traced(command, node) if one.partition == 2 else command

    if shutil.which("strace"):
        monkeypatch.setattr(
            deployment, "superlink_command", lambda d: _traced(superlink_command(d), server)
        )
        monkeypatch.setattr(deployment, "supernode_command", traced_node)
    tree = make_tree(tmp_path / "tree")
    spec = noisy_spec(4, "data.name=imagefolder", f"data.path={tree}")
    done = deploy(spec, tmp_path / "d")
    assert_none_alive(str(tmp_path))
    assert len(done.nodes) == 4
    assert spec.train.rounds == 2
    run = Run.open(done.run)
    assert run.deployed
    assert not run.vault.exists()
    assert not run.events()
    assert len(list(run.reconstructions.rglob("*.safetensors"))) >= 8
    for one in done.nodes:
        names = [file.stem for file in sorted(one.vault.rglob("*.safetensors"))]
        assert names == [f"client-{one.partition:04d}"] * 2, "the truth of its own client alone"
    if server.is_file():
        trace = server.read_text(errors="replace")
        assert str(done.run) in trace, "the trace saw the server at work"
        assert str(done.root / "nodes") not in trace
        assert str(tree) not in trace
        trace = node.read_text(errors="replace")
        assert str(done.nodes[2].data) in trace, "the trace saw the node at work"
        for other in (done.server, tree, *(n.root for n in done.nodes if n.partition != 2)):
            assert str(other) not in trace
    gather(run, [node.vault for node in done.nodes])
    conclude(run)
    simulated = audit(spec, tmp_path / "simulated")
    assert simulated.scores["psnr"].max() < 100, "scores at their ceiling would compare nothing"
    pd.testing.assert_frame_equal(run.scores[SCORES], simulated.scores[SCORES], rtol=1e-4)


@pytest.mark.slow
def test_nodes_that_are_unknown_or_distrust_the_server_are_turned_away(tmp_path: Path) -> None:
    keys, other = make_keys(tmp_path / "keys", 2), make_keys(tmp_path / "other", 2)
    planned = plan_deployment(tmp_path / "d", 2, keys)
    lay_out(planned, noisy_spec(2))
    stranger, misled = planned.nodes
    elsewhere = replace(planned, keys=Keys(other.root))
    for name, command, expected in (
        ("stranger", supernode_command(planned, stranger), "does not know its key"),
        ("misled", supernode_command(elsewhere, misled), "is not signed by the authority"),
    ):
        processes = Processes()
        try:
            processes.start("superlink", superlink_command(planned), planned.server)
            processes.wait_for_port(planned.port)
            processes.start(name, command, stranger.root)
            with pytest.raises(RunError, match=f"the {name} ended: .*{expected}"):
                _until_it_ends(processes)
        finally:
            processes.stop()
    assert_none_alive(str(tmp_path))


def _until_it_ends(processes: Processes) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        processes.check()
        time.sleep(0.2)


@pytest.mark.slow
def test_nodes_that_are_the_same_client_stop_the_run_where_nobody_else_is_there(
    tmp_path: Path,
) -> None:
    planned = plan_deployment(tmp_path / "d", 2, make_keys(tmp_path / "keys", 2))
    first, second = planned.nodes
    lay_out(planned, noisy_spec(2))
    with pytest.raises(FedsimError, match="two nodes say they are client 0") as caught:
        _federated(replace(planned, nodes=(first, replace(second, partition=0))), second.key)
    assert "\n" not in str(caught.value)
    assert_none_alive(str(tmp_path))


@pytest.mark.slow
def test_a_node_with_a_wrong_partition_id_is_left_out_and_told(tmp_path: Path) -> None:
    planned = plan_deployment(tmp_path / "d", 2, make_keys(tmp_path / "keys", 2))
    first, second = planned.nodes
    lay_out(planned, noisy_spec(2))
    _federated(replace(planned, nodes=(first, replace(second, partition=7))), second.key)
    run = Run.open(planned.run)
    assert list(run.rounds["clients"]) == [1, 1]
    told = {event["kind"]: event["message"] for event in run.events()}
    assert "a node says it is client 7, and there are clients 0 to 1 only" in told["node_refused"]
    assert told["client_silent"] == "client 1 is not there"
    assert_none_alive(str(tmp_path))


@pytest.mark.slow
def test_a_node_that_uploads_what_is_no_update_costs_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # the liar finds its defense
    planned = plan_deployment(tmp_path / "d", 3, None)
    lay_out(planned, noisy_spec(3))
    liar = "defenses=[{name: 'tests.faults:Liar'}]"
    planned.nodes[1].spec.write_text(noisy_spec(3, liar).to_yaml())
    deployment.carry_out(planned)
    run = Run.open(planned.run)
    assert list(run.rounds["clients"]) == [2, 2]
    assert [(e["kind"], e["round"], e["client"]) for e in run.events()] == [
        ("update_rejected", 1, 1),
        ("update_rejected", 2, 1),
    ]
    assert "has the shape (2, " in run.events()[0]["message"]
    assert_none_alive(str(tmp_path))


def _federated(wrong: Deployment, key: Path | None) -> None:
    """As `started`, but the second node's key is registered whoever it says it is."""
    assert wrong.keys is not None
    assert key is not None
    only = replace(wrong, nodes=wrong.nodes[:1])
    with started(only) as processes:
        call(register_command(key.with_suffix(".pub")), wrong.server, "the key")
        processes.start("impostor", supernode_command(wrong, wrong.nodes[1]), wrong.nodes[1].root)
        deployment.federate(wrong, processes)


@pytest.mark.slow
def test_a_killed_deployment_goes_on_and_gives_the_scores_of_the_simulation(tmp_path: Path) -> None:
    spec, root = noisy_spec(2, "train.rounds=3"), tmp_path / "d"
    (tmp_path / "spec.yaml").write_text(spec.to_yaml())
    words = ["deploy", str(tmp_path / "spec.yaml"), "-o", str(root), "--insecure"]
    command = [sys.executable, "-m", "fedsim.cli", *words]
    run, log = Run(root / "server" / "run"), tmp_path / "deploy.log"
    with log.open("wb") as sink:
        first = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        end = time.monotonic() + 300
        while not run.checkpoint.is_file() and first.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        first.kill()
        first.wait()
    assert len(read_checkpoint(run).rows) == 1, log.read_text()
    assert alive(str(root)), "what it started outlived it"
    assert not (root / "keys").exists()
    dealt = {file: file.stat().st_mtime_ns for file in (root / "nodes").glob("*/data/*")}
    again = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert again.returncode == 0, again.stdout + again.stderr
    assert_none_alive(str(root))
    assert {file: file.stat().st_mtime_ns for file in (root / "nodes").glob("*/data/*")} == dealt
    assert list(run.rounds["round"]) == [1, 2, 3]
    gather(run, [root / "nodes" / str(client) / "vault" for client in range(2)])
    conclude(run)
    simulated = audit(spec, tmp_path / "simulated")
    assert simulated.scores["psnr"].max() < 100, "scores at their ceiling would compare nothing"
    pd.testing.assert_frame_equal(run.scores[SCORES], simulated.scores[SCORES], rtol=1e-4)

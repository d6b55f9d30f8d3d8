"""Real deployments: command lines, bad input, and federations over TLS on loopback."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pandas as pd
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Context, RecordDict
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest
from flwr.proto.run_pb2 import GetRunResponse
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedsim.audit.stages import attack_captured, audit, conclude
from fedsim.clients.app import ClientSide
from fedsim.clients.shards import images_of, shards_of
from fedsim.core.errors import FedsimError, RunError, SpecError
from fedsim.core.observation import read_observation
from fedsim.core.run import Run, observation_path
from fedsim.core.spec import Spec
from fedsim.core.vault import Vault
from fedsim.deploy import apps, deployment
from fedsim.deploy.deployment import (
    Deployment,
    Node,
    check_deployable,
    deploy,
    front_command,
    lay_out,
    plan_deployment,
    start_server,
    started,
    superlink_command,
    supernode_command,
)
from fedsim.deploy.flower import (
    Processes,
    call,
    found,
    register_command,
    run_command,
    write_app,
    write_home,
)
from fedsim.deploy.guard import tells_users
from fedsim.deploy.keys import Keys, make_keys
from fedsim.deploy.scorer import gather
from fedsim.federation.checkpoint import read_checkpoint
from fedsim.federation.grids import InlineGrid
from fedsim.scoring.canary import canary
from tests.conftest import small_spec
from tests.deploy.conftest import alive, assert_none_alive, by_nobody, deployed_copy, snapshot
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
    commands = superlink_command(one), front_command(one), supernode_command(one, one.nodes[1])
    for command in commands:
        assert command[command.index("--host") + 1] == "127.0.0.1"
    ports = [one.port, one.own_port, *(node.port for node in one.nodes)]
    assert len(set(ports)) == 4


def test_nodes_are_told_of_the_front_and_the_operator_of_the_superlink(
    planned: Deployment,
) -> None:
    lay_out(planned, small_spec("data.clients=2"))
    for node in planned.nodes:
        told = supernode_command(planned, node)
        assert told[told.index("--superlink") + 1] == planned.address
        assert planned.superlink not in " ".join(told)
    passing = front_command(planned)
    assert passing[passing.index("--superlink") + 1] == planned.superlink
    assert (
        f'address = "{planned.superlink}"' in (planned.server / "flwr" / "config.toml").read_text()
    )


def test_what_cannot_be_kept_out_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "tells_users", lambda: True)
    assert deployment.open_to() is None
    monkeypatch.setattr(deployment, "tells_users", lambda: False)
    sentence = deployment.open_to()
    assert sentence is not None
    assert sentence.startswith("other users of this machine can reach the SuperLink")
    assert sentence.count(".") == 1


def test_a_superlink_that_came_up_without_its_guard_is_not_used(
    planned: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(planned, small_spec("data.clients=2"))
    plain = [sys.executable, "-m", "http.server", str(planned.own_port), "--bind", "127.0.0.1"]
    monkeypatch.setattr(deployment, "superlink_command", lambda planned: plain)
    monkeypatch.setattr(deployment, "tells_users", lambda: True)
    with pytest.raises(RunError, match="open to other users"), started(planned):
        pass
    assert not planned.record.exists()


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


def test_a_clients_own_spec_may_be_in_any_encoding(planned: Deployment) -> None:
    spec = small_spec("data.clients=2")
    lay_out(planned, spec)
    own = "name: für mich\n".encode("latin-1")
    planned.nodes[0].spec.write_bytes(own)
    lay_out(planned, spec)
    assert planned.nodes[0].spec.read_bytes() == own
    assert planned.nodes[1].spec.read_text() == spec.to_yaml()


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
    scored = gather(run, [honest.vault, other.vault], tmp_path / "scored")
    conclude(scored)
    canaries = scored.scores.groupby("client")["canary"].max()
    assert canaries[0] < 1e-4 < canaries[1], "what a client does not announce is found"


def test_neither_server_nor_clients_need_the_data_set(tmp_path: Path, as_simulated: None) -> None:
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
    scored = gather(run, [node.vault for node in planned.nodes], tmp_path / "scored")
    conclude(scored)
    assert [event["kind"] for event in scored.events()] == ["pictures_skipped"]
    simulated = audit(spec, tmp_path / "simulated")
    pd.testing.assert_frame_equal(scored.scores[SCORES], simulated.scores[SCORES])
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
    with pytest.raises(SpecError, match="grants candidates"):
        check_deployable(small_spec("threat={model: C, candidates: 4}"))


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


def test_missing_rounds_of_clients_elsewhere_are_not_simulated(
    small_run: Run, tmp_path: Path
) -> None:
    run, _ = deployed_copy(small_run, tmp_path)
    run.checkpoint.unlink()
    for again in (lambda: attack_captured(run.root), lambda: audit(run.spec, run.root)):
        with pytest.raises(RunError, match="go on with the `fedsim deploy`"):
            again()
    assert not run.vault.exists()


def assert_scored_apart(run: Run, done: Deployment) -> None:
    """Scored in a directory of its own: every client is replayed by the secret in its vault, which
    is not the one that its server could work out, and nothing of the truth is left with that."""
    before = snapshot(run.root)
    scored = gather(run, [node.vault for node in done.nodes], done.scored)
    conclude(scored)
    assert snapshot(run.root) == before
    assert scored.scores["canary"].max() < 1e-4
    assert len(scored.scores) >= len(done.nodes) * run.spec.train.rounds
    for round_ in range(1, run.spec.train.rounds + 1):
        for node in done.nodes:
            side = ClientSide(run.spec, node.vault)
            truth = Vault(scored.vault).read(round_, node.partition)
            assert truth.defense_seed >= 2**63
            seen = read_observation(observation_path(run.observations, round_, node.partition))
            guessed = replace(truth, defense_seed=side.secret(round_, node.partition))
            assert canary(seen, guessed, torch.device("cpu")) > 1e-3


def _traced(command: list[str], log: Path) -> list[str]:
    flower = found(command)
    return ["strace", "-f", "-qq", "-e", "trace=openat,open,rename,link", "-o", str(log), *flower]


@pytest.mark.slow
def test_a_deployment_over_tls_captures_what_its_clients_did(
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
    assert_scored_apart(run, done)


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
            start_server(planned, processes)
            processes.start(name, command, stranger.root)
            with pytest.raises(RunError, match=f"the {name} ended: .*{expected}"):
                _until_it_ends(processes)
        finally:
            processes.stop()
    assert_none_alive(str(tmp_path))


HOSTILE = """
from pathlib import Path

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid, context):
    Path({mark!r}).touch()
"""


def _refused_as_operator(planned: Deployment, key: Path) -> None:
    """What an operator may ask, asked by whoever holds a key, at the address that nodes know."""
    assert planned.keys is not None
    private = load_ssh_private_key(key.read_bytes(), None)
    assert isinstance(private, EllipticCurvePrivateKey)
    public = private.public_key()
    signs = NodeAuthHttpInterceptor(private, public)
    trusted = planned.keys.authority.read_bytes()
    wishes = {
        "control/register-node": RegisterNodeRequest(public_key=public_key_to_bytes(public)),
        "control/start-run": StartRunRequest(),
        "runtime/acquire-task": AcquireTaskRequest(),
        "fleet/register-node": RegisterNodeFleetRequest(public_key=public_key_to_bytes(public)),
    }
    with FleetHttpClient.from_server_address(planned.address, False, trusted, [signs]) as asks:
        for path, wish in wishes.items():
            with pytest.raises(httpx.HTTPStatusError) as refused:
                asks._unary_unary(
                    path=f"/v1/{path}", rpc_method="", request=wish, response_type=GetRunResponse
                )
            assert refused.value.response.status_code == 403, path


def _asked_by_another_user(port: int) -> bytes:
    """What the SuperLink's own port says to another user of the machine."""
    with by_nobody():
        plain = socket.create_connection(("127.0.0.1", port), timeout=20)
    context = ssl._create_unverified_context()
    with plain, context.wrap_socket(plain) as secret:
        secret.sendall(
            b"POST /v1/control/list-runs HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n"
            b"content-type: application/protobuf\r\nconnection: close\r\n\r\n"
        )
        return secret.recv(4096)


@pytest.mark.slow
def test_neither_strangers_nor_nodes_register_or_submit_while_the_honest_train(
    tmp_path: Path,
) -> None:
    keys, strangers = make_keys(tmp_path / "keys", 2), make_keys(tmp_path / "strangers", 1)
    planned = plan_deployment(tmp_path / "d", 2, keys)
    lay_out(planned, noisy_spec(2))
    mark, elsewhere = tmp_path / "mark", tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_home(elsewhere, planned.address, keys.authority)
    write_app(elsewhere / "app")
    (elsewhere / "app" / "fedsim_deployment.py").write_text(HOSTILE.format(mark=str(mark)))
    hostile = run_command(elsewhere / "app", planned.spec, None, planned.run)
    with started(planned) as processes:
        for command in (register_command(strangers.node_public(0)), hostile):
            with pytest.raises(RunError, match=r"was refused: .*403"):
                call(command, elsewhere, "what a stranger asks")
        for key in (strangers.node(0), keys.node(0)):
            _refused_as_operator(planned, key)
        if os.getuid() == 0 and tells_users():
            assert _asked_by_another_user(planned.own_port).startswith(b"HTTP/1.1 403")
            assert _asked_by_another_user(planned.port).startswith(b"HTTP/1.1 403")
        deployment.federate(planned, processes)
        assert list(Run.open(planned.run).rounds["round"]) == [1, 2]
        assert not mark.exists()
        call(hostile, planned.server, "what the operator asks")
        end = time.monotonic() + 60
        while not mark.exists() and time.monotonic() < end:
            time.sleep(0.2)
        assert mark.exists(), "the app would have run, had it been accepted"
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
def test_a_killed_deployment_goes_on_and_every_client_can_be_replayed(tmp_path: Path) -> None:
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
    end = time.monotonic() + 30
    while alive(str(root)) and time.monotonic() < end:
        time.sleep(0.1)
    assert_none_alive(str(root))  # what it started ended with it, and what that started too
    assert not (root / "keys").exists()
    dealt = {file: file.stat().st_mtime_ns for file in (root / "nodes").glob("*/data/*")}
    again = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert again.returncode == 0, again.stdout + again.stderr
    assert_none_alive(str(root))
    assert {file: file.stat().st_mtime_ns for file in (root / "nodes").glob("*/data/*")} == dealt
    assert list(run.rounds["round"]) == [1, 2, 3]
    assert_scored_apart(run, plan_deployment(root, 2, None))


@pytest.mark.slow
def test_a_deployed_server_fishes_and_its_clients_notice(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    spec = small_spec(
        *("data.clients=4", "train.clients_per_round=4", "train.rounds=2", "train.batch_size=4"),
        *("data.name=imagefolder", f"data.path={tree}", "audit.gallery=0", "threat=F"),
        *("server.manoeuvre={name: fishing}", "guards=[{name: weight_check}, {name: same_model}]"),
    )
    done = deploy(spec, tmp_path / "d")
    assert_none_alive(str(tmp_path))
    run = Run.open(done.run)
    scored = gather(run, [node.vault for node in done.nodes], done.scored)
    conclude(scored)
    assert scored.scores["canary"].max() < 1e-4
    claimed = scored.scores[(scored.scores["attack"] == "patch_solve") & scored.scores["claimed"]]
    alone = claimed[claimed.groupby(["round", "client"])["image"].transform("count") == 1]
    assert len(alone)
    assert float(alone["psnr"].min()) > 60
    weights, same = scored.summary["noticed"]["guards"]
    assert weights["noticed"] == weights["tampered"] == 8
    assert same["noticed"] == 0, "on machines of their own, clients cannot talk to each other"

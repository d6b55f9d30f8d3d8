"""The containers' files: valid, locked down, and their commands run a federation as processes."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import psutil
import pytest
import yaml
from ray._common.utils import get_ray_address_file
from typer.testing import CliRunner

from fedsim.cli import app
from fedsim.clients.dealing import open_holding, read_public
from fedsim.cluster.authentication import knock
from fedsim.cluster.local import ATTACK_RESOURCE
from fedsim.cluster.processes import free_ports
from fedsim.core.run import Run
from fedsim.core.spec import load_spec
from fedsim.deploy import front
from fedsim.deploy.flower import Processes
from fedsim.deploy.keys import make_keys
from tests.deploy.conftest import snapshot
from tests.deploy.test_front import ATTEMPTS, PULL, Server

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((Path(__file__).parents[1] / "compose_schema.json").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
NODES = [name for name in SERVICES if name.startswith("supernode-")]
RAY_NODES = [name for name in SERVICES if "--node-manager-port=6380" in SERVICES[name]["command"]]


def _mounts(service: str) -> dict[str, str]:
    """Where each volume or file of a service is seen, by that place."""
    pairs = (volume.split(":") for volume in SERVICES[service].get("volumes", []))
    return {target: source for source, target, *_ in pairs}


def test_the_compose_file_fits_the_specification() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(COMPOSE, SCHEMA)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("restart", "sometimes"),
        ("comand", ["x"]),
        ("network_mode", "host"),
        ("healthcheck", {"test": ["python"]}),
        ("shm_size", "4 gigabytes"),
        ("depends_on", {"keys": {"condition": "ready"}}),
    ],
)
def test_a_mistake_in_the_compose_file_would_be_found(key: str, value: object) -> None:
    wrong = copy.deepcopy(COMPOSE)
    wrong["services"]["superlink"][key] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


def test_what_services_refer_to_is_there() -> None:
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in SERVICES, f"{name} waits for {other}"
            if how["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other], f"{other} never gets healthy"
        for source in _mounts(name).values():
            known = (ROOT / source).is_file() if source.startswith(".") else source in volumes()
            assert known, f"{name} mounts {source}"
        assert set(service.get("networks", [])) <= set(COMPOSE["networks"])
        assert f"AS {service['build']['target']}\n" in (ROOT / "Dockerfile").read_text()


def test_a_profile_starts_all_that_its_services_wait_for() -> None:
    for name, service in SERVICES.items():
        for other in service.get("depends_on", {}):
            there = SERVICES[other].get("profiles")
            assert there is None or set(service["profiles"]) <= set(there), f"{name}: {other}"


@pytest.mark.parametrize("name", ["attack", "attack-gpu"])
def test_an_attack_waits_for_a_node_that_offers_the_resource(name: str) -> None:
    awaited = SERVICES[name]["depends_on"]
    workers = [n for n in awaited if f'{ATTACK_RESOURCE}": 1' in str(SERVICES[n]["command"])]
    assert [awaited[worker]["condition"] for worker in workers] == ["service_healthy"]


def test_ray_asks_for_a_token_that_it_shares_with_nobody_else() -> None:
    on_ray = {name for name in SERVICES if "ray" in SERVICES[name].get("networks", [])}
    assert on_ray
    for name in on_ray:
        told = SERVICES[name]["environment"]
        assert told["RAY_AUTH_MODE"] == "token"
        assert _mounts(name)[str(Path(told["RAY_AUTH_TOKEN_PATH"]).parent)] == "keys-ray"
    for name in SERVICES.keys() - on_ray - {"keys"}:
        assert "keys-ray" not in _mounts(name).values()


def volumes() -> set[str]:
    return set(COMPOSE["volumes"])


def test_no_service_is_root_or_can_become_so() -> None:
    for service in SERVICES.values():
        assert service["user"] == "10001:10001"
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    for stage in re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.M)[2:]:
        assert "\nUSER fedsim\n" in stage


def test_truth_and_private_keys_are_where_they_belong_alone() -> None:
    for name in SERVICES:
        mounted = set(_mounts(name).values())
        number = name.removeprefix("supernode-") if name in NODES else None
        own = {f"keys-node-{number}", f"vault-{number}", f"shard-{number}"} if number else set()
        kinds = ("keys-node", "vault", "keys-server", "keys-front", "shard", "scored")
        private = {volume for volume in mounted if volume.startswith(kinds)}
        if name == "superlink":
            own = {"keys-server", "shard-server"}
        elif name == "front":
            own = {"keys-front"}
        elif name == "deal":
            own = {volume for volume in volumes() if volume.startswith("shard")}
        elif name == "score":
            own = {f"vault-{n}" for n in range(len(NODES))} | {"scored"}
        elif name == "viewer":
            own = {"scored"}
        elif name == "keys":
            own = {v for v in volumes() if v.startswith("keys-")} - {"keys-shared", "keys-ray"}
        assert private == own, name


def test_what_is_scored_goes_where_neither_server_nor_workers_look() -> None:
    words = SERVICES["score"]["command"]
    output = Path(words[words.index("--output") + 1])
    assert _mounts("score")[str(output.parent)] == "scored"
    assert SERVICES["score"]["network_mode"] == "none"
    for name in ("score", "viewer"):
        keys = Path(SERVICES[name]["environment"]["FEDSIM_VAULT_KEYS"])
        assert _mounts(name)[str(keys.parent)] == "scored"
    for number, name in enumerate(NODES):  # the key of its vault lies beside that
        vault = re.findall(r'vault="(\S+)"', " ".join(SERVICES[name]["command"]))[0]
        assert _mounts(name)[str(Path(vault).parent)] == f"vault-{number}"


def _on(network: str) -> set[str]:
    return {name for name in SERVICES if network in SERVICES[name].get("networks", [])}


def test_nodes_reach_the_front_and_those_who_submit_the_superlink() -> None:
    assert _on("fleet") == {*NODES, "front"}
    assert _on("link") == {"front", "superlink"}
    assert _on("control") == {"superlink", "register", "run"}
    for name in NODES:
        assert SERVICES[name]["networks"] == ["fleet"]
        command = SERVICES[name]["command"]
        assert command[command.index("--superlink") + 1] == "front:8000"
        assert SERVICES[name]["depends_on"]["front"] == {"condition": "service_healthy"}
    for name in ("register", "run"):
        assert "superlink:8000" in SERVICES[name]["command"]
    assert not any("ports" in service for service in SERVICES.values())
    assert not [source for source in _mounts("superlink").values() if "vault" in source]


def test_the_front_shows_a_certificate_for_its_own_name() -> None:
    assert {"front", "superlink"} <= set(SERVICES["keys"]["command"])
    assert "haproxy" in SERVICES["front"]["command"]
    stage = re.findall(r"AS front\n(.*?)^FROM", (ROOT / "Dockerfile").read_text(), re.S | re.M)
    assert "apt-get install --yes --no-install-recommends haproxy" in stage[0]


def test_a_shard_is_dealt_without_a_network_and_only_read_by_its_node() -> None:
    for number, name in enumerate(NODES):
        assert f"shard-{number}:/srv/data:ro" in SERVICES[name]["volumes"]
        assert 'data="/srv/data"' in " ".join(SERVICES[name]["command"])
        done = {"condition": "service_completed_successfully"}
        assert SERVICES[name]["depends_on"]["deal"] == done
    assert SERVICES["deal"]["network_mode"] == "none"


def test_the_image_has_every_folder_that_something_is_written_to() -> None:
    """A volume takes its owner from the folder of the image: else it would be root's."""
    made = re.findall(r"for folder in (.+?); do", (ROOT / "Dockerfile").read_text(), flags=re.S)
    folders = {f"/srv/{word}" for word in made[0].replace("\\", " ").split()}
    for name, service in SERVICES.items():
        mounts = [volume.split(":") for volume in service.get("volumes", [])]
        assert {target for _, target, *how in mounts if not how} <= folders, name


def test_nothing_is_copied_into_an_image_but_code() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), flags=re.M)
    allowed = {"pyproject.toml", "README.md", "LICENSE", "deploy/*.sh"}
    allowed |= {"fedsim", "attacks", "defenses", "clients"}
    assert {source for line in copied for source in line.split()} == allowed
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    assert "*" in ignored
    assert {line[1:] for line in ignored if line.startswith("!")} == allowed


def test_there_is_a_node_for_every_client_of_the_spec() -> None:
    spec = load_spec(ROOT / "deploy" / "spec.yaml")
    assert spec.data.clients == len(NODES)
    told = [" ".join(SERVICES[name]["command"]) for name in NODES]
    found = [int(re.findall(r"partition-id=(\d+)", words)[0]) for words in told]
    assert found == list(range(len(NODES)))
    assert all(f"num-partitions={len(NODES)}" in words for words in told)


# -- the same commands as processes ---------------------------------------------------------


class Machine:
    """Every service with a root folder of its own, in which it finds only what it mounts; and one
    for temporary files, which a container has by itself."""

    def __init__(self, root: Path, spec: Path, temporary: Path):
        self.root, self.spec, self.temporary = root, spec, temporary
        self.port, self.front, self.ray, *self.ports = free_ports(3 + len(NODES))
        self.managers = dict(zip(RAY_NODES, free_ports(len(RAY_NODES)), strict=True))
        for name in SERVICES:
            for target, source in _mounts(name).items():
                place = self.folder(name) / target.lstrip("/")
                place.parent.mkdir(parents=True, exist_ok=True)
                volume = root / "volumes" / source
                if source.endswith(".cfg"):
                    place.write_text(self._adapted((ROOT / source).read_text(), name))
                    continue
                if source.startswith("."):
                    volume = spec
                else:
                    volume.mkdir(parents=True, exist_ok=True)
                place.symlink_to(volume)
            (self.folder(name)).mkdir(exist_ok=True)

    def folder(self, service: str) -> Path:
        return self.root / "machines" / service

    def command(self, service: str, seen_by: str | None = None) -> list[str]:
        """The service's own command, on loopback and in its own folder."""
        top = self.folder(seen_by or service)
        words = [self._rewritten(word, top, service) for word in SERVICES[service]["command"]]
        if words[0] == "haproxy" and shutil.which("haproxy") is None:
            return self._front_of_our_own(top)
        if service in NODES:  # containers have a loopback each, processes share one
            words += ["--port", str(self.ports[NODES.index(service)])]
        return [sys.executable, "-m", "fedsim.cli", *words[1:]] if words[0] == "fedsim" else words

    def _front_of_our_own(self, top: Path) -> list[str]:
        shown = ["--certificate", f"{top}/srv/keys/front/front.pem"]
        shown += ["--key", f"{top}/srv/keys/front/front.pem"]
        to = ["--superlink", f"127.0.0.1:{self.port}"]
        to += ["--authority", f"{top}/srv/keys/shared/ca.pem"]
        program = [sys.executable, "-P", str(Path(front.__file__))]
        return [*program, "--host", "127.0.0.1", "--port", str(self.front), *to, *shown]

    def _adapted(self, configuration: str, service: str) -> str:
        """The front's configuration, on loopback and in its own folder."""
        bound = configuration.replace("bind :8000", f"bind 127.0.0.1:{self.front}")
        return self._rewritten(bound, self.folder(service), service)

    def _rewritten(self, word: str, top: Path, service: str) -> str:
        if word in ("0.0.0.0", "8000"):
            return "127.0.0.1" if word == "0.0.0.0" else str(self.port)
        port = self.front if service == "front" else self.port
        for found, put in (
            ("6380", str(self.managers.get(service, 0))),  # one a node
            ("9094", str(self.ports[NODES.index(service)]) if service in NODES else "0"),
            ("'127.0.0.1', 8000", f"'127.0.0.1', {port}"),
            ("front:8000", f"127.0.0.1:{self.front}"),
            ("ray-head:6379", f"127.0.0.1:{self.ray}"),
            ("--port=6379", f"--port={self.ray}"),
            ("/opt/fedsim/", f"{ROOT}/"),
            ("/srv/", f"{top}/srv/"),
            ("/etc/fedsim/", f"{top}/etc/fedsim/"),
            ("superlink:8000", f"127.0.0.1:{self.port}"),
        ):
            word = word.replace(found, put)
        return word

    def environment(self, service: str) -> dict[str, str]:
        """What the service is told, and where it finds the tools."""
        told = SERVICES[service].get("environment", {})
        top = self.folder(service)
        own = {name: self._rewritten(value, top, service) for name, value in told.items()}
        own["TMPDIR"] = str(self.temporary)
        tools = str(Path(sys.executable).parent)
        path = os.pathsep.join([tools, os.environ["PATH"]])
        return own | {"FEDSIM": f"{sys.executable} -m fedsim.cli", "PATH": path}

    def wait_for(self, service: str, seconds: float = 180) -> None:
        """Until the service's own check says that it is healthy, as `depends_on` has it."""
        _, *check = SERVICES[service]["healthcheck"]["test"]
        command = [self._rewritten(word, self.folder(service), service) for word in check]
        end = time.monotonic() + seconds
        while subprocess.run([sys.executable, *command[1:]], stderr=subprocess.DEVNULL).returncode:
            assert time.monotonic() < end, f"{service} does not get healthy"
            time.sleep(0.5)

    def call(self, service: str, seen_by: str | None = None) -> None:
        done = subprocess.run(
            self.command(service, seen_by),
            env=os.environ | self.environment(service),
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    own = tmp_path / "spec.yaml"
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="f") as temporary:  # Ray wants a short path
        machine = Machine(tmp_path, own, Path(temporary))
        changes = [f"engine.address='127.0.0.1:{machine.ray}'", "train.rounds=1"]
        own.write_text(load_spec(ROOT / "deploy" / "spec.yaml", changes).to_yaml())
        yield machine


def _processes_of(port: int) -> dict[int, str]:
    """The processes of a Ray cluster, and what each was started with."""
    lines = {
        one.pid: " ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])
    }
    return {
        n: line for n, line in lines.items() if re.search(rf"gcs[-_]address=\S+:{port}\b", line)
    }


def _nodes_of(port: int) -> set[int]:
    return {n for n, line in _processes_of(port).items() if line.split()[0].endswith("/raylet")}


def _assert_soon(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    assert condition()


# Ray's record of the current cluster, which every plain Ray program of this user follows.
RECORD = Path(get_ray_address_file(None))


def test_keys_are_handed_to_whom_they_belong_and_made_once(machine: Machine) -> None:
    machine.call("keys")
    held = {
        volume.name: sorted(file.name for file in volume.iterdir())
        for volume in (machine.root / "volumes").iterdir()
    }
    assert held["keys-server"] == ["server.key", "server.pem"]
    assert held["keys-front"] == ["front.pem"]
    assert held["keys-node-2"] == ["key"]
    assert held["keys-ray"] == ["token"]
    assert held["keys-shared"] == ["ca.pem", *(f"node-{n}.pub" for n in range(len(NODES)))]
    key = machine.root / "volumes" / "keys-server" / "server.key"
    token = machine.root / "volumes" / "keys-ray" / "token"
    assert re.fullmatch("[0-9a-f]{64}", token.read_text())
    before = key.read_bytes(), token.read_bytes()
    machine.call("keys")
    assert (key.read_bytes(), token.read_bytes()) == before
    assert key.stat().st_mode & 0o777 == 0o600
    shown = machine.root / "volumes" / "keys-front" / "front.pem"
    assert key.read_text() in shown.read_text()
    assert shown.stat().st_mode & 0o777 == 0o600
    shown.unlink()  # as a kill leaves it that came before the last was handed out
    machine.call("keys")
    assert key.read_bytes() != before[0]
    assert key.read_text() in shown.read_text()


def test_shards_are_dealt_to_whom_they_belong(machine: Machine) -> None:
    result = CliRunner().invoke(app, machine.command("deal")[3:])
    assert result.exit_code == 0, result.output
    spec = load_spec(machine.spec)
    own = [
        open_holding(machine.root / "volumes" / f"shard-{client}", spec, client)
        for client in range(len(NODES))
    ]
    indices = np.concatenate([held.indices for held in own])
    assert len(indices) == len(set(indices)) > 100 * len(NODES)
    assert read_public(machine.root / "volumes" / "shard-server" / "public.json", spec) == 8


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="there is no haproxy")
def test_haproxy_passes_calls_of_nodes_alone(machine: Machine) -> None:
    keys = make_keys(machine.root / "keys", 0)
    seen = machine.folder("front") / "srv" / "keys"
    shutil.copy(keys.authority, seen / "shared")
    shown = seen / "front" / "front.pem"
    shown.write_text(keys.certificate.read_text() + keys.server_key.read_text())
    superlink = Server(machine.port)
    secret = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    secret.load_cert_chain(keys.certificate, keys.server_key)
    superlink.server.socket = secret.wrap_socket(superlink.server.socket, server_side=True)
    thread = threading.Thread(target=superlink.server.serve_forever)
    thread.start()
    processes = Processes()
    try:
        processes.start("front", machine.command("front"), machine.folder("front"))
        machine.wait_for("front")
        trusted = ssl.create_default_context(cafile=keys.authority)
        where = f"https://127.0.0.1:{machine.front}"
        told = {"flwr-signature": "c2ln"}
        answer = httpx.post(f"{where}{PULL}", content=b"ping", headers=told, verify=trusted)
        assert (answer.status_code, answer.content) == (200, b"pong")
        ((_, path, headers, body),) = superlink.seen
        assert (path, body, headers["flwr-signature"]) == (PULL, b"ping", "c2ln")
        assert httpx.post(f"{where}/v1/control/start-run", verify=trusted).status_code == 403
        assert httpx.get(f"{where}{PULL}", verify=trusted).status_code == 405
        for sent in ATTEMPTS:
            with (
                socket.create_connection(("127.0.0.1", machine.front), timeout=5) as plain,
                trusted.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
            ):
                connection.sendall(sent)
                connection.settimeout(0.5)
                with contextlib.suppress(OSError):
                    while connection.recv(4096):
                        pass
        assert {path for _, path, _, _ in superlink.seen} <= {PULL}
        assert b"start-run" not in b"".join(body for *_, body in superlink.seen)
    finally:
        processes.stop()
        superlink.server.shutdown()
        superlink.server.server_close()
        thread.join()


@pytest.mark.slow
def test_the_services_commands_run_a_federation(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes()
    try:
        machine.call("keys")
        machine.call("deal")
        folder = machine.folder("superlink")
        processes.start("superlink", machine.command("superlink"), folder)
        machine.wait_for("superlink")
        processes.start("front", machine.command("front"), machine.folder("front"))
        machine.wait_for("front")
        machine.call("register")
        machine.call("register")  # as when everything is brought up again
        for name in NODES:
            processes.start(name, machine.command(name), machine.folder(name))
        for name in NODES:
            machine.wait_for(name)
        machine.call("run", seen_by="superlink")  # paths are the SuperLink's
    finally:
        processes.stop()
    run = Run.open(machine.root / "volumes" / "runs" / "deployed")
    assert not run.vault.exists()
    assert run.classes == 8, "the server counted none itself"
    try:
        for name in ("ray-head", "attack-worker"):
            for key, value in machine.environment(name).items():
                monkeypatch.setenv(key, value)
            processes.start(name, machine.command(name), machine.folder(name))
            machine.wait_for(name)
        assert knock(f"127.0.0.1:{machine.ray}"), "without the token nobody is let in"
        nodes = _nodes_of(machine.ray)
        assert len(nodes) == 2
        machine.call("attack")
        _assert_soon(lambda: _nodes_of(machine.ray) == nodes)
    finally:
        processes.stop()
    _assert_soon(lambda: not _processes_of(machine.ray))
    assert not RECORD.is_file() or not RECORD.read_text().endswith(f":{machine.ray}")
    before = snapshot(run.root)
    for _ in range(2):  # said again, everything is taken anew
        machine.call("score")
    assert snapshot(run.root) == before
    scored = Run.open(machine.root / "volumes" / "scored" / "deployed")
    assert set(scored.scores["client"]) == set(range(len(NODES)))
    assert scored.scores.query("attack == 'patch_solve'")["psnr"].min() > 60

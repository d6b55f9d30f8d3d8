"""A Ray to run on: found, or told in one sentence soon."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import ray

from fedsim.audit.stages import audit
from fedsim.cluster import local, session
from fedsim.cluster.processes import free_ports
from fedsim.cluster.session import ray_session
from fedsim.core.errors import RunError
from tests.conftest import small_spec


def test_something_else_than_ray_at_the_address_is_one_sentence_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        began = time.monotonic()
        engine = small_spec(f"engine={{kind: ray, address: '{address}'}}").engine
        with pytest.raises(RunError, match="no Ray"), ray_session(engine):
            pass
        assert time.monotonic() - began < 10


def test_no_cluster_of_ours_is_one_sentence_before_anything_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "fedsim.audit.stages.prepare", lambda spec, classes=None: pytest.fail("it was prepared")
    )
    port = free_ports(1)[0]
    for address, words in (("auto", "fedsim cluster up"), (f"127.0.0.1:{port}", "refused")):
        spec = small_spec(f"engine={{kind: ray, address: '{address}'}}")
        with pytest.raises(RunError, match=words) as caught:
            audit(spec, tmp_path / "run")
        assert "\n" not in str(caught.value)


def test_ray_leaves_to_a_command_how_a_signal_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**options: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: None)  # as Ray does

    def own(number: int, frame: object) -> None: ...

    monkeypatch.setattr(ray, "init", init)
    before = signal.signal(signal.SIGTERM, own)
    try:
        session._connect(None, tmp_path, small_spec().engine)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_address_without_a_port_is_refused() -> None:
    engine = small_spec("engine={kind: ray, address: somewhere}").engine
    with pytest.raises(RunError, match="host:port"), ray_session(engine):
        pass


@pytest.mark.slow
def test_a_node_for_attacks_that_joins_late_is_waited_for(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    joining = threading.Timer(8, local.add, (state,), {"cpus": 0, "attack": 1})
    try:
        address = local.start(state, cpus=1, attack=0).address
        joining.start()
        engine = small_spec(f"engine={{kind: ray, address: '{address}'}}").engine
        with ray_session(engine):
            assert ray.cluster_resources()[local.ATTACK_RESOURCE] == 1
    finally:
        joining.cancel()
        joining.join()
        local.stop(state)

"""A Ray of ours is used by whoever has its token, and by nobody else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent import futures
from dataclasses import asdict
from pathlib import Path

import grpc
import pytest
import ray

from fedsim.cluster import authentication
from fedsim.cluster.local import Cluster, state_file
from fedsim.cluster.processes import Child, began
from fedsim.cluster.session import _settings, ray_session
from fedsim.core.errors import RunError
from fedsim.core.files import write_json
from fedsim.core.spec import EngineSpec
from tests.conftest import small_spec


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path))
    for name in (authentication.MODE, authentication.ADDRESS):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_token_is_made_once_and_for_its_owner_alone(cache: Path) -> None:
    file = authentication.token_file()
    made = file.read_text()
    assert len(made) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    assert authentication.token_file().read_text() == made
    assert list(cache.iterdir()) == [file]


def test_a_token_that_others_can_read_is_check_refused(cache: Path) -> None:
    authentication.token_file().chmod(0o644)
    with pytest.raises(RunError, match="open to others"):
        authentication.settings()


def test_an_emptied_token_is_refused_before_ray_sees_it(cache: Path) -> None:
    authentication.token_file().write_text("\n")
    with pytest.raises(RunError, match="too short"):
        authentication.settings()


def test_a_users_own_setting_holds(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert authentication.settings()[authentication.MODE] == "token"
    monkeypatch.setenv(authentication.MODE, "disabled")
    assert authentication.settings() == {}


def test_settings_are_taken_back(cache: Path) -> None:
    before = dict(os.environ)
    with authentication.applied(authentication.settings()):
        assert os.environ[authentication.MODE] == "token"
    assert dict(os.environ) == before


heard: list[str] = []  # what was said at the door


@pytest.fixture
def strict(request: pytest.FixtureRequest) -> Iterator[str]:
    """A head of Ray as far as its door: it lets in whoever says the right words, or nobody."""
    allowed: str | None = request.param
    heard.clear()

    class Door(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            said = dict(details.invocation_metadata).get("authorization", "")
            heard.append(said)
            if allowed is None:
                return None

            def answer(content: bytes, context: grpc.ServicerContext) -> bytes:
                token = authentication.token_file().read_text() if allowed == "ours" else allowed
                if token and said != f"Bearer {token}":
                    context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")
                return b""

            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Door(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.parametrize("strict", ["ours"], indirect=True)
def test_a_cluster_that_we_started_is_told_our_token(cache: Path, strict: str) -> None:
    assert authentication.knock(strict)
    assert authentication.settings_for(strict, ours=True) == authentication.settings()
    assert heard[-1] == f"Bearer {authentication.token_file().read_text()}"


def _engine(address: str) -> EngineSpec:
    return small_spec(f"engine={{kind: ray, address: '{address}'}}").engine


def _check_refused(address: str, words: str) -> None:
    with pytest.raises(RunError, match=words) as caught, ray_session(_engine(address)):
        pass
    assert "\n" not in str(caught.value)
    assert not ray.is_initialized()


def _record(address: str, moment: float | None) -> None:
    """As `fedsim cluster up` leaves it, with this process for a head."""
    head = Child(os.getpid(), moment)
    write_json(state_file(), asdict(Cluster(address, "/nowhere", (head,))))


@pytest.mark.parametrize("strict", ["ours"], indirect=True)
@pytest.mark.parametrize("known", ["nothing", "another address", "a head that is gone"])
def test_an_address_that_only_asks_for_the_token_is_not_told_it(
    cache: Path, strict: str, known: str
) -> None:
    if known == "another address":
        _record("127.0.0.1:1", began(os.getpid()))
    elif known == "a head that is gone":
        _record(strict, 1.0)
    _check_refused(strict, f"asks for a token, and none was named for it; .* RAY_ADDRESS={strict}")
    assert set(heard) == {""}


@pytest.mark.parametrize("strict", ["ours"], indirect=True)
def test_a_cluster_is_known_as_ours_by_its_record(cache: Path, strict: str) -> None:
    _record(strict, began(os.getpid()))
    assert _settings(strict) == authentication.settings()
    assert _settings(strict.replace("127.0.0.1", "localhost")) == authentication.settings()


@pytest.mark.parametrize("strict", ["another"], indirect=True)
def test_a_users_own_token_goes_to_the_address_it_was_named_for(
    cache: Path, strict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "own").write_text("another")
    monkeypatch.setenv(authentication.MODE, "token")
    monkeypatch.setenv(authentication.PATH, str(cache / "own"))
    for named in (None, "127.0.0.1:1"):
        if named:
            monkeypatch.setenv(authentication.ADDRESS, named)
        _check_refused(strict, "none was named for it")
    monkeypatch.setenv(authentication.ADDRESS, strict)
    assert _settings(strict) == {}, "Ray takes the user's own settings"
    assert set(heard) == {""}


@pytest.mark.parametrize("strict", [""], indirect=True)
def test_a_cluster_that_asks_for_none_is_sent_none(
    cache: Path, strict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _settings(strict) == {}
    monkeypatch.setenv(authentication.MODE, "token")
    assert _settings(strict) == {authentication.MODE: "disabled"}
    assert _settings(f"ray://{strict}") == {authentication.MODE: "disabled"}
    monkeypatch.setenv(authentication.ADDRESS, strict)
    assert _settings(strict) == {}


@pytest.mark.parametrize(
    ("strict", "words"),
    [("another", "asks for a token"), (None, "no Ray")],
    indirect=["strict"],
)
def test_a_cluster_of_others_is_one_sentence(cache: Path, strict: str, words: str) -> None:
    _check_refused(strict, words)


@pytest.mark.parametrize("strict", ["another"], indirect=True)
def test_a_cluster_of_ours_with_another_token_is_one_sentence(cache: Path, strict: str) -> None:
    _record(strict, began(os.getpid()))
    _check_refused(strict, "asks for another token")


def test_a_ray_of_our_own_lets_no_stranger_in(cache: Path) -> None:
    with ray_session(small_spec("engine={kind: ray, cpus: 1}").engine):
        address = ray.get_runtime_context().gcs_address
        assert authentication.knock(address)
        assert authentication.knock(address, "a guess")
        assert not authentication.knock(address, authentication.token_file().read_text())
    assert authentication.MODE not in os.environ

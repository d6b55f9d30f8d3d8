"""A Ray of ours is used by whoever has its token, and by nobody else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
import ray

from fedsim.cluster import authentication
from fedsim.cluster.session import ray_session
from fedsim.core.errors import RunError
from tests.conftest import small_spec


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path))
    monkeypatch.delenv(authentication.MODE, raising=False)
    return tmp_path


def test_the_token_is_made_once_and_for_its_owner_alone(cache: Path) -> None:
    file = authentication.token_file()
    made = file.read_text()
    assert len(made) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    assert authentication.token_file().read_text() == made
    assert list(cache.iterdir()) == [file]


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


@pytest.fixture
def strict(request: pytest.FixtureRequest) -> Iterator[str]:
    """A head of Ray as far as its door: it lets in whoever says the right words, or nobody."""
    allowed: str | None = request.param

    class Door(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            said = dict(details.invocation_metadata).get("authorization", "")
            if allowed is None:
                return None

            def answer(content: bytes, context: grpc.ServicerContext) -> bytes:
                token = authentication.token_file().read_text() if allowed == "ours" else allowed
                if said != f"Bearer {token}":
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
def test_a_cluster_that_asks_is_told_our_token(cache: Path, strict: str) -> None:
    assert authentication.knock(strict)
    assert authentication.settings_for(strict) == authentication.settings()


@pytest.mark.parametrize(
    ("strict", "words"),
    [("another", "asks for another token"), (None, "no Ray")],
    indirect=["strict"],
)
def test_a_cluster_of_others_is_one_sentence(cache: Path, strict: str, words: str) -> None:
    engine = small_spec(f"engine={{kind: ray, address: '{strict}'}}").engine
    with pytest.raises(RunError, match=words) as caught, ray_session(engine):
        pass
    assert "\n" not in str(caught.value)
    assert not ray.is_initialized()


def test_a_ray_of_our_own_lets_no_stranger_in(cache: Path) -> None:
    with ray_session(small_spec("engine={kind: ray, cpus: 1}").engine):
        address = ray.get_runtime_context().gcs_address
        assert authentication.knock(address)
        assert authentication.knock(address, "a guess")
        assert not authentication.knock(address, authentication.token_file().read_text())
    assert authentication.MODE not in os.environ

"""The front: calls of SuperNodes pass as they are, and nothing else does, however it is written."""

from __future__ import annotations

import asyncio
import inspect
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import uvicorn
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supernode import fleet_http_client

from fedsim.cluster.processes import free_ports
from fedsim.deploy import front as module
from fedsim.deploy.front import (
    CALLS,
    CONNECTIONS,
    KEYLESS,
    LIMIT,
    OBJECT,
    SMALL,
    Bodies,
    Front,
    refusal,
)

PULL = "/v1/fleet/pull-messages"
ROOM, PATIENCE = 4 * 2**20, 3.0  # of the front that is tested: bytes and seconds


def test_the_calls_are_those_that_a_supernode_makes() -> None:
    made = set(re.findall(r'path="(\S+)"', inspect.getsource(fleet_http_client)))
    assert made == {*CALLS, *KEYLESS}
    known = {path for method, path in PROTOBUF_REQUEST_TYPES if path.startswith("/v1/fleet/")}
    assert made == known


LENGTH = [(b"content-length", b"3")]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_a_node_is_not_refused(call: str) -> None:
    assert refusal("POST", call.encode(), b"", LENGTH, set(CALLS)) is None


@pytest.mark.parametrize(
    ("method", "target", "query", "headers", "status"),
    [
        ("POST", b"/v1/control/start-run", b"", LENGTH, 403),
        ("POST", b"/v1/control/register-node", b"", LENGTH, 403),
        ("POST", b"/v1/runtime/acquire-task", b"", LENGTH, 403),
        ("POST", b"/v1/fleet/register-node", b"", LENGTH, 403),
        ("POST", b"/v1/fleet/", b"", LENGTH, 403),
        ("POST", b"/v1/fleet/pull-messages/", b"", LENGTH, 403),
        ("POST", b"/v1/fleet/pull-messages/../../control/start-run", b"", LENGTH, 403),
        ("POST", b"/v1/fleet/%2e%2e/control/start-run", b"", LENGTH, 403),
        ("POST", b"//v1/control/start-run", b"", LENGTH, 403),
        ("POST", b"//v1/fleet/pull-messages", b"", LENGTH, 403),
        ("POST", b"/V1/fleet/pull-messages", b"", LENGTH, 403),
        ("POST", b"/v1/fleet/pull%2dmessages", b"", LENGTH, 403),
        ("POST", b"/v1/fleet/pull-messages;/v1/control", b"", LENGTH, 403),
        ("POST", b"/v1/fleet/pull-messages\xff", b"", LENGTH, 403),
        ("POST", b"https://superlink/v1/fleet/pull-messages", b"", LENGTH, 403),
        ("POST", b"*", b"", LENGTH, 403),
        ("POST", PULL.encode(), b"x=1", LENGTH, 403),
        ("GET", PULL.encode(), b"", LENGTH, 405),
        ("CONNECT", PULL.encode(), b"", LENGTH, 405),
        ("POST", PULL.encode(), b"", [], 411),
        ("POST", PULL.encode(), b"", [*LENGTH, *LENGTH], 411),
        ("POST", PULL.encode(), b"", [(b"content-length", b"+3")], 411),
        ("POST", PULL.encode(), b"", [*LENGTH, (b"Transfer-Encoding", b"chunked")], 411),
        ("POST", PULL.encode(), b"", [(b"content-length", str(SMALL + 1).encode())], 413),
        ("POST", OBJECT.encode(), b"", [(b"content-length", str(LIMIT + 1).encode())], 413),
        ("POST", PULL.encode(), b"", [(b"content-length", b"9" * 5000)], 413),
    ],
)
def test_whatever_else_is_refused(
    method: str, target: bytes, query: bytes, headers: list[tuple[bytes, bytes]], status: int
) -> None:
    refused = refusal(method, target, query, headers, set(CALLS))
    assert refused is not None
    assert refused[0] == status


def test_an_object_may_be_larger_than_other_calls() -> None:
    assert OBJECT in CALLS
    large = [(b"content-length", str(LIMIT).encode())]
    assert refusal("POST", OBJECT.encode(), b"", large, set(CALLS)) is None
    small = [(b"content-length", str(SMALL).encode())]
    assert refusal("POST", PULL.encode(), b"", small, set(CALLS)) is None


class Server:
    """A SuperLink as far as its door: it writes down what reaches it."""

    def __init__(self, port: int = 0) -> None:
        seen: list[tuple[str, str, dict[str, str], bytes]] = []

        class Door(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                seen.append((self.command, self.path, dict(self.headers), body))
                self.send_response(200)
                self.send_header("content-type", "application/protobuf")
                self.send_header("content-length", "4")
                self.send_header("flwr-version-incompatibility-message", "old")
                self.send_header("set-cookie", "no")
                self.end_headers()
                self.wfile.write(b"pong")

            def do_GET(self) -> None:
                seen.append((self.command, self.path, {}, b""))

            def log_message(self, *_: object) -> None: ...

        self.seen = seen
        self.server = ThreadingHTTPServer(("127.0.0.1", port), Door)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def superlink() -> Iterator[Server]:
    one = Server()
    thread = threading.Thread(target=one.server.serve_forever)
    thread.start()
    yield one
    one.server.shutdown()
    one.server.server_close()
    thread.join()


@pytest.fixture
def front(superlink: Server) -> Iterator[int]:
    """The port of a front before that SuperLink, without TLS."""
    (port,) = free_ports(1)
    servers: list[uvicorn.Server] = []

    async def run() -> None:
        async with httpx.AsyncClient(base_url=f"http://{superlink.address}") as client:
            config = uvicorn.Config(
                Front(client, room=ROOM, seconds=PATIENCE),
                port=port,
                http="h11",
                ws="none",
                lifespan="off",
                log_level="error",
            )
            servers.append(uvicorn.Server(config))
            await servers[0].serve()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    end = time.monotonic() + 20
    while not (servers and servers[0].started) and time.monotonic() < end:
        time.sleep(0.02)
    yield port
    servers[0].should_exit = True
    thread.join()


def test_a_call_and_its_answer_pass_with_flowers_own_headers(front: int, superlink: Server) -> None:
    answer = httpx.post(
        f"http://127.0.0.1:{front}{PULL}",
        content=b"ping",
        headers={
            "content-type": "application/protobuf",
            "flwr-signature": "c2ln",
            "authorization": "Bearer x",
            "x-forwarded-for": "127.0.0.1:1",
            "upgrade": "h2c",
        },
    )
    assert (answer.status_code, answer.content) == (200, b"pong")
    assert answer.headers["flwr-version-incompatibility-message"] == "old"
    assert "set-cookie" not in answer.headers
    ((method, path, headers, body),) = superlink.seen
    assert (method, path, body) == ("POST", PULL, b"ping")
    told = {name.lower() for name in headers}
    assert {"content-type", "flwr-signature"} <= told
    assert not told & {"authorization", "x-forwarded-for", "upgrade", "transfer-encoding"}


SMUGGLED = b"POST /v1/control/start-run HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
HEAD = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\n"


ATTEMPTS = [
    SMUGGLED,
    b"POST /v1/fleet/../control/start-run HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
    b"POST http://x/v1/control/start-run HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
    b"http2-settings: AAMAAABkAAQAAP__\r\n\r\n",
    HEAD + b"content-length: 0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    HEAD + b"content-length: 0\r\ncontent-length: 75\r\n\r\n" + SMUGGLED,
    HEAD + b"content-length: 0\r\n\r\n" + SMUGGLED,
    HEAD + b"content-length : 0\r\n\r\n" + SMUGGLED,
    HEAD + b"content-length: 0\r\nx: 1\n\n" + SMUGGLED,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01" + bytes(200),
]


@pytest.mark.parametrize("sent", ATTEMPTS)
def test_bytes_that_two_readers_could_take_differently_reach_nobody(
    front: int, superlink: Server, sent: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", front), timeout=5) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    assert {path for _, path, _, _ in superlink.seen} <= {PULL}
    assert b"start-run" not in b"".join(body for *_, body in superlink.seen)


def _announce(front: int, sent: bytes, length: int) -> socket.socket:
    """A call under way, of which so much has come."""
    connection = socket.create_connection(("127.0.0.1", front), timeout=20)
    connection.sendall(HEAD + f"content-length: {length}\r\n\r\n".encode() + sent)
    return connection


def _status(connection: socket.socket) -> bytes:
    with connection:
        return connection.recv(4096).split(b"\r\n")[0]


def test_a_body_that_does_not_come_is_not_waited_for(front: int, superlink: Server) -> None:
    began = time.monotonic()
    assert _status(_announce(front, b"x" * 1000, 2000)) == b"HTTP/1.1 408 Request Timeout"
    assert PATIENCE - 0.5 < time.monotonic() - began < PATIENCE + 10
    assert superlink.seen == []


def test_bodies_that_do_not_end_are_given_up_for_those_that_do(
    front: int, superlink: Server
) -> None:
    piece = b"x" * 2**20
    began = time.monotonic()
    slow = [_announce(front, piece, 2 * 2**20) for _ in range(4)]
    time.sleep(0.5)  # they fill the room
    answer = httpx.post(f"http://127.0.0.1:{front}{PULL}", content=piece, timeout=20)
    assert answer.content == b"pong"
    assert [len(body) for *_, body in superlink.seen] == [2**20]
    assert _status(slow[0]) == b"HTTP/1.1 408 Request Timeout"
    assert time.monotonic() - began < PATIENCE, "it went before its time was over"
    slow[3].sendall(piece)  # the youngest of them is still awaited
    assert _status(slow[3]) == b"HTTP/1.1 200 OK"
    for one in slow[1:3]:
        one.close()


def test_of_all_bodies_together_no_more_is_held_than_there_is_room_for() -> None:
    peak, given_up = 0, 0

    async def slow(bodies: Bodies) -> None:
        nonlocal peak, given_up

        async def receive() -> dict[str, object]:
            nonlocal peak
            peak = max(peak, bodies.held + sum(bodies._awaited.values()))
            await asyncio.sleep(0.01)
            return {"type": "http.request", "body": b"x" * 100, "more_body": True}

        try:
            async with bodies.read(receive):
                pytest.fail("it never ends")
        except TimeoutError:
            given_up += 1

    async def flood() -> Bodies:
        bodies = Bodies(room=1000, seconds=0.5)
        await asyncio.gather(*(slow(bodies) for _ in range(50)))
        return bodies

    left = asyncio.run(flood())
    assert 0 < peak <= 1000
    assert given_up == 50
    assert (left.held, left._awaited) == (0, {})


def test_there_is_a_most_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[uvicorn.Config] = []

    class Silent:
        def __init__(self, config: uvicorn.Config):
            seen.append(config)

        async def serve(self) -> None: ...

    monkeypatch.setattr(module.uvicorn, "Server", Silent)
    module.serve("127.0.0.1", 1, "127.0.0.1:2")
    assert [config.limit_concurrency for config in seen] == [CONNECTIONS]


def test_a_superlink_that_is_gone_is_told(superlink: Server) -> None:
    async def asked() -> int:
        async with httpx.AsyncClient(base_url="http://127.0.0.1:1") as nobody:
            through = httpx.ASGITransport(app=Front(nobody))  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=through, base_url="http://front") as node:
                return (await node.post(PULL, content=b"x")).status_code

    assert asyncio.run(asked()) == 502


def test_compose_passes_the_same_calls() -> None:
    told = (Path(__file__).parents[2] / "deploy" / "front.cfg").read_text()
    assert tuple(re.findall(r"acl a_call url -m str (\S+)", told)) == CALLS
    assert f"if {{ req.hdr_val(content-length) gt {LIMIT} }}" in told
    assert f"acl an_object url -m str {OBJECT}\n" in told
    assert f"if !an_object {{ req.hdr_val(content-length) gt {SMALL} }}" in told

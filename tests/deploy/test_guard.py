"""The guard: a server answers the user who started it, and nobody else on the machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedsim.cluster.processes import answers, free_ports
from fedsim.deploy import guard
from fedsim.deploy.guard import GUARDED, guarded, tells_users, user_at
from tests.deploy.conftest import by_nobody

ASK = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
PROGRAM = """
import sys, uvicorn
sys.path.insert(0, {folder!r})
import guard
guard.guard_servers()

async def application(scope, receive, send):
    if scope["type"] == "http":
        await send({{"type": "http.response.start", "status": 200, "headers": []}})
        await send({{"type": "http.response.body", "body": b"welcome"}})

uvicorn.run(application, host="127.0.0.1", port={port}, log_level="error")
"""

needs_table = pytest.mark.skipif(not tells_users(), reason="this system tells no users apart")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        yield client, server


@needs_table
def test_the_owner_of_a_connection_is_known_while_it_is_open() -> None:
    with connected() as (client, server):
        ends = client.getsockname(), server.getsockname()
        assert user_at(*ends) == os.getuid()
        assert user_at(("127.0.0.1", 1), ends[1]) is None
        client.close()
        assert user_at(*ends) is None, "what nobody holds is listed as root's"


def test_without_a_table_nobody_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "TABLE", tmp_path / "none")
    assert not tells_users()
    with connected() as (client, server):
        assert user_at(client.getsockname(), server.getsockname()) is None
    assert user_at(("::1", 1), ("::1", 2)) is None


@needs_table
@needs_root
def test_a_connection_of_another_user_is_told_from_our_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with by_nobody():
            client = socket.create_connection(server.getsockname())
        with client:
            assert user_at(client.getsockname(), server.getsockname()) == 65534


@pytest.fixture
def server(tmp_path: Path) -> Iterator[int]:
    (port,) = free_ports(1)
    program = PROGRAM.format(folder=str(Path(guard.__file__).parent), port=port)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=log, stderr=log)
    try:
        end = time.monotonic() + 30
        while not answers(port) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        assert GUARDED in (tmp_path / "log").read_text()
        yield port
    finally:
        process.kill()
        process.wait()


def asked(connection: socket.socket, headers: bytes = b"") -> bytes:
    connection.sendall(ASK + headers + b"\r\n")
    answer = b""
    while more := connection.recv(4096):
        answer += more
    return answer


@needs_table
def test_a_server_under_guard_answers_its_own_user(server: int) -> None:
    with socket.create_connection(("127.0.0.1", server), timeout=10) as own:
        assert b"welcome" in asked(own)


@needs_table
@needs_root
def test_a_server_under_guard_answers_nobody_else_whatever_they_say(server: int) -> None:
    with socket.create_connection(("127.0.0.1", server), timeout=10) as own:
        borrowed = f"x-forwarded-for: 127.0.0.1:{own.getsockname()[1]}\r\n".encode()
        for headers in (b"", borrowed):
            with by_nobody():
                other = socket.create_connection(("127.0.0.1", server), timeout=10)
            with other:
                answer = asked(other, headers)
            assert answer.startswith(b"HTTP/1.1 403")
            assert b"welcome" not in answer


def test_a_program_is_started_apart_from_the_modules_beside_the_guard() -> None:
    command = guarded("flower-superlink", ["--port", "1"])
    assert command[:2] == [sys.executable, "-P"]
    assert command[-3:] == ["flower-superlink", "--port", "1"]
    shown = subprocess.run([*guarded("front", []), "--help"], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "--superlink" in shown.stdout

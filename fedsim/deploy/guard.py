"""Guard: servers on this machine that answer processes of one user alone.

Flower's servers run what they are sent, and on loopback every user of a machine reaches them. On
Linux the kernel says whose the other end of such a connection is: whoever is not the user who
started the server is turned away.

Run as a program, this starts one of ours or of Flower's with every server in it guarded. It imports
nothing of fedsim, so that such a process is no larger than it was.
"""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

TABLE = Path("/proc/net/tcp")
ESTABLISHED = "01"
GUARDED = "guarded: only processes of the user who started this are answered"  # in a log
PROGRAMS = {
    "flower-superlink": ("flwr.superlink.cli", "flower_superlink"),
    "flower-supernode": ("flwr.supernode.cli", "flower_supernode"),
}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


def guarded(program: str, words: list[str]) -> list[str]:
    """The command of a program with its servers guarded."""
    # -P: the modules beside the guard must not be taken for others of their names.
    return [sys.executable, "-P", str(Path(__file__).absolute()), program, *words]


def user_at(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Whose the client's end of a connection is; None where nobody says so."""
    try:
        ends = [_as_listed(*client), _as_listed(*server)]
        rows = [line.split() for line in TABLE.read_text().splitlines()[1:]]
    except (OSError, ValueError):
        return None
    for row in rows:
        # A socket that nobody holds any more is listed as root's, and has no number.
        if row[1:3] == ends and row[3] == ESTABLISHED and row[9] != "0":
            return int(row[7])
    return None


def tells_users() -> bool:
    """Whether this machine says whose a connection is: it is asked about one of our own."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        return user_at(client.getsockname(), server.getsockname()) == os.getuid()


class OwnUser:
    """An ASGI application for processes of the user who started it, and for nobody else's."""

    def __init__(self, application: Application):
        self.application = application

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_own(scope):
            await self.application(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            about = [(b"content-type", b"text/plain"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 403, "headers": about})
            words = b"this server answers processes of the user who started it alone\n"
            await send({"type": "http.response.body", "body": words})

    def _is_own(self, scope: Message) -> bool:
        client, server = scope.get("client"), scope.get("server")
        if client is None or server is None:
            return False
        return user_at(client, server) == os.getuid()


def guard_servers() -> None:
    """Guard every server that this process starts from here on."""
    import uvicorn

    plain = uvicorn.Config.__init__

    def with_guard(self: uvicorn.Config, app: Any, *args: Any, **options: Any) -> None:
        # A header could otherwise say that the client is somebody else.
        plain(self, OwnUser(app), *args, **{**options, "proxy_headers": False})
        print(GUARDED, flush=True)

    uvicorn.Config.__init__ = with_guard  # type: ignore[method-assign]


def _as_listed(host: str, port: int) -> str:
    """An end of a connection as the kernel's table has it: the address in this machine's order."""
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}:{port:04X}"


def main(program: str, words: list[str]) -> None:
    if tells_users():
        guard_servers()
    sys.argv = [program, *words]
    if program in PROGRAMS:
        module, function = PROGRAMS[program]
        getattr(importlib.import_module(module), function)()
    else:
        runpy.run_path(str(Path(__file__).with_name(f"{program}.py")), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

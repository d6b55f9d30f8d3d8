"""Server: one socket on loopback, one address with a token, until Ctrl-C."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import uvicorn

from fedsim.core.errors import RunError, SpecError
from fedsim.viewer.access import is_loopback
from fedsim.viewer.app import create_app


def serve(
    directories: Iterable[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    ready: Callable[[str], None] = print,
) -> None:
    """Serve these runs; ``ready`` is told the address once it can be opened."""
    token = secrets.token_urlsafe(24)
    app = create_app(directories, token)
    with listen(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{listener.getsockname()[1]}/?token={token}")
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="error",
                access_log=False,  # addresses hold the token
                proxy_headers=False,
                server_header=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=1,
            )
        )
        server.run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """A socket that already listens, so that the address is true when it is printed."""
    if not is_loopback(host):
        raise SpecError(
            f"'{host}' is not this machine's loopback address; the pages hold clients' pictures "
            f"and are shown here alone: use 127.0.0.1."
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise RunError(
                f"port {port} on {host} is in use; choose another with --port, or leave it out."
            ) from error
        raise RunError(f"cannot listen on {host}, port {port}: {error.strerror}.") from error
    return listener

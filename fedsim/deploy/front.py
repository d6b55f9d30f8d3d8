"""Front: all that SuperNodes reach of a SuperLink.

Flower's SuperLink serves nodes, operators and its own helpers on one port, and asks nodes alone for
a key: whoever reaches that port can have code run on the server and on every node. So nodes are
given the address of a front, which passes the calls of nodes and knows no others.

A request that is passed is made anew: its path from the list below, its body whole and with its
length, and of its headers Flower's own. What a path could mean after decoding, and where one
request ends and the next begins, is not left to two readers.

Who calls is known to the SuperLink alone, so a body is held for whoever sends one: for so long, and
of all bodies together so many bytes. When there are more, the one that is awaited longest goes
first: whoever sends slowly keeps nobody out who does not. Like the guard, this imports nothing of
fedsim.
"""

from __future__ import annotations

import argparse
import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

CALLS = tuple(
    f"/v1/fleet/{name}"
    for name in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
# Of nodes without a key, which make themselves known: where there is no security in any case.
KEYLESS = ("/v1/fleet/register-node", "/v1/fleet/unregister-node")
OBJECT = "/v1/fleet/push-object"  # the one call that carries arrays
LIMIT = 64 * 2**20  # bytes of an object; Flower sends arrays in pieces of 5 MiB
SMALL = 8 * 2**20  # bytes of any other call
ROOM = 512 * 2**20  # bytes of all bodies together
BODY_SECONDS = 120.0  # for a body to come
SECONDS = 60.0  # for the SuperLink to answer
CONNECTIONS = 1000

Message = MutableMapping[str, Any]
Headers = list[tuple[bytes, bytes]]


def refusal(
    method: str, target: bytes, query: bytes, headers: Headers, calls: set[str]
) -> tuple[int, str] | None:
    """Why a request is not passed, as a status and a sentence; None for a call of a node."""
    lengths = [value for name, value in headers if name.lower() == b"content-length"]
    if target.decode("latin-1") not in calls or query:
        return 403, "calls of SuperNodes are all that this address passes"
    if method != "POST":
        return 405, "calls of SuperNodes are posted"
    if any(name.lower() == b"transfer-encoding" for name, _ in headers):
        return 411, "a call comes whole and says its length"
    if len(lengths) != 1 or not lengths[0].isdigit():
        return 411, "a call says its length once"
    most = LIMIT if target == OBJECT.encode() else SMALL
    if len(lengths[0]) > 12 or int(lengths[0]) > most:
        return 413, f"such a call has at most {most} bytes"
    return None


def passed_on(headers: Headers) -> Headers:
    """The headers that matter to Flower."""
    return [
        (name, value)
        for name, value in headers
        if name in (b"content-type", b"accept") or name.startswith(b"flwr-")
    ]


class Bodies:
    """What is held of all bodies, each until its call is answered."""

    def __init__(self, room: int, seconds: float):
        self.room, self.seconds, self.held = room, seconds, 0
        self._awaited: dict[asyncio.Timeout, int] = {}  # the oldest first, and what came of it

    @asynccontextmanager
    async def read(self, receive: Callable[[], Awaitable[Message]]) -> AsyncIterator[bytes | None]:
        """The body of a call, None where its sender is gone; a TimeoutError where it comes too
        late, or room is needed for others."""
        content = bytearray()
        async with asyncio.timeout(self.seconds) as limit:
            self._awaited[limit] = 0
            try:
                whole = await self._receive(receive, content, limit)
            finally:
                self._awaited.pop(limit, None)
        body = bytes(content)
        content.clear()
        self.held += len(body)
        try:
            yield body if whole else None
        finally:
            self.held -= len(body)

    async def _receive(
        self, receive: Callable[[], Awaitable[Message]], content: bytearray, limit: asyncio.Timeout
    ) -> bool:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            content += message.get("body", b"")
            if limit in self._awaited:
                self._awaited[limit] = len(content)
            self._make_room()
            if not message.get("more_body"):
                return True

    def _make_room(self) -> None:
        """Give up those that are awaited longest, until the rest fit."""
        while self._awaited and self.held + sum(self._awaited.values()) > self.room:
            oldest = next(iter(self._awaited))
            del self._awaited[oldest]
            oldest.reschedule(asyncio.get_running_loop().time())


class Front:
    """An ASGI application that passes some calls to a SuperLink and refuses whatever else comes."""

    def __init__(
        self,
        superlink: httpx.AsyncClient,
        calls: Iterable[str] = CALLS,
        *,
        room: int = ROOM,
        seconds: float = BODY_SECONDS,
    ):
        self.superlink = superlink
        self.calls = set(calls)
        self.bodies = Bodies(room, seconds)

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http":
            return
        headers: Headers = list(scope["headers"])
        target, query = scope["raw_path"], scope["query_string"]
        reason = refusal(scope["method"], target, query, headers, self.calls)
        if reason is not None:
            await _answer(send, reason[0], [(b"connection", b"close")], reason[1].encode())
            return
        try:
            async with self.bodies.read(receive) as content:
                if content is None:
                    return
                answer = await self.superlink.post(
                    target.decode(), content=content, headers=passed_on(headers)
                )
        except httpx.HTTPError:
            await _answer(send, 502, [], b"the SuperLink does not answer")
            return
        except TimeoutError:
            words = b"the call did not come in time, or there was no room for it; make it again"
            await _answer(send, 408, [(b"connection", b"close")], words)
            return
        told = [(name.lower(), value) for name, value in answer.headers.raw]
        await _answer(send, answer.status_code, passed_on(told), answer.content)


async def _answer(
    send: Callable[[Message], Awaitable[None]], status: int, headers: Headers, body: bytes
) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def serve(
    host: str,
    port: int,
    superlink: str,
    *,
    authority: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Pass calls of nodes to a SuperLink until this process is ended; without an authority, without
    TLS on either side, and then nodes need no keys."""
    asyncio.run(_serve(host, port, superlink, authority, certificate, key))


async def _serve(
    host: str,
    port: int,
    superlink: str,
    authority: Path | None,
    certificate: Path | None,
    key: Path | None,
) -> None:
    trusted = ssl.create_default_context(cafile=str(authority)) if authority else False
    async with httpx.AsyncClient(
        base_url=f"{'https' if authority else 'http'}://{superlink}",
        verify=trusted,
        timeout=SECONDS,
        limits=httpx.Limits(max_keepalive_connections=32, keepalive_expiry=2),  # it waits 5 s
        trust_env=False,
    ) as client:
        config = uvicorn.Config(
            Front(client, CALLS if authority else (*CALLS, *KEYLESS)),
            host=host,
            port=port,
            http="h11",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            access_log=False,
            log_level="warning",
            timeout_keep_alive=75,
            limit_concurrency=CONNECTIONS,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        await uvicorn.Server(config).serve()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--superlink", required=True)
    for name in ("--authority", "--certificate", "--key"):
        parser.add_argument(name, type=Path)
    serve(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()

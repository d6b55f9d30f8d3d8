"""Access: who may ask, and what every answer carries.

The pages hold the clients' pictures. Other users of the machine and other pages in the same browser
must not get at them: a token that only the terminal saw, loopback names alone (a foreign name that
resolves to this machine is refused), GET alone, and no permission for any other site.

A token stands in an address, and addresses are kept: in a browser's history, in a terminal's. So it
is good for minutes, and what it is exchanged for is a session of some hours, one for each visitor.
A viewer that is started again has new ones.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import time
from collections.abc import Callable
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'self'"
)
# A report is shown as it was written. Whatever is in it runs in an origin of its own: it reaches no
# other run, no cookie and no other site.
REPORT_POLICY = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; img-src data:; font-src data:; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'self'"
)
HEADERS = {
    "Content-Security-Policy": PAGE_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

TOKEN_SECONDS = 15 * 60.0  # for which an address can be opened
SESSION_SECONDS = 12 * 3600.0  # for which a browser is let in
MOST_SESSIONS = 32  # the oldest gives way
WAY_IN = "Open the address that `fedsim view` printed: its token is missing, or the visit is over."
TOO_OLD = "The token of this address is too old to be used: start `fedsim view` again for another."


def is_loopback(host: str) -> bool:
    """Whether a name or an address can only mean this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AccessControl:
    """Stands before the application; nothing of it is reached without the token or a session."""

    def __init__(
        self, app: ASGIApp, token: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.app, self._token, self._clock = app, token, clock
        self._until = clock() + TOKEN_SECONDS
        self._sessions: dict[str, float] = {}  # until when each is good, the oldest first
        # Ports share their cookies: two viewers side by side need names of their own.
        self.cookie = f"fedsim-view-{secrets.token_hex(4)}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a socket that nobody answers is closed by the server

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._judge(Request(scope))
        await (answer or self.app)(scope, receive, send_with_headers)

    def _judge(self, request: Request) -> Response | None:
        """A refusal or a redirect; None lets the request through."""
        if not _asks_for_this_machine(request):
            return _refusal(400, "This viewer answers only to its own loopback address.")
        if request.method != "GET":
            return _refusal(405, "This viewer only shows things: use GET.", {"Allow": "GET"})
        given = request.query_params.get("token")
        if self._is_known(request.cookies.get(self.cookie, "")):
            return None if given is None else _without_token(request)
        if given is not None and _same(given, self._token):
            return self._admit(request) if self._clock() < self._until else _refusal(403, TOO_OLD)
        return _refusal(403, WAY_IN)

    def _is_known(self, session: str) -> bool:
        """Whether a browser was let in, and not too long ago."""
        now = self._clock()
        good = [known for known, until in self._sessions.items() if now < until]
        return any(_same(session, known) for known in good)

    def _admit(self, request: Request) -> Response:
        """A cookie in exchange for the token."""
        session = secrets.token_urlsafe(32)
        self._sessions[session] = self._clock() + SESSION_SECONDS
        for old in list(self._sessions)[:-MOST_SESSIONS]:
            del self._sessions[old]
        answer = _without_token(request)
        answer.set_cookie(
            self.cookie,
            session,
            max_age=int(SESSION_SECONDS),
            httponly=True,
            samesite="strict",
            path="/",
        )
        return answer


def _without_token(request: Request) -> Response:
    """The same address, so that the token does not stay in it."""
    query = [pair for pair in parse_qsl(request.url.query) if pair[0] != "token"]
    # One slash at the start, or a browser would read the rest as another site's name.
    path = "/" + request.url.path.lstrip("/\\")
    return RedirectResponse(f"{path}?{urlencode(query)}" if query else path, 303)


def _asks_for_this_machine(request: Request) -> bool:
    hosts = request.headers.getlist("host")
    if len(hosts) != 1:
        return False
    name = hosts[0]
    if name.startswith("["):
        name, bracket, port = name[1:].partition("]")
        port = port.removeprefix(":")
        if not bracket:
            return False
    else:
        name, _, port = name.partition(":")
    return is_loopback(name) and (not port or port.isdecimal())


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _refusal(status: int, words: str, headers: dict[str, str] | None = None) -> Response:
    return PlainTextResponse(words + "\n", status, headers)

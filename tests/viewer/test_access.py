"""Who may look at runs in a browser, and what can be reached: token, cookie, host, paths, links."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from fedsim.viewer.access import MOST_SESSIONS, SESSION_SECONDS, TOKEN_SECONDS, AccessControl
from fedsim.viewer.app import create_app
from tests.viewing import TOKEN, ask, key_of, look


def test_without_the_token_there_is_one_sentence_and_nothing_else(shelf: Path) -> None:
    app = create_app([shelf], TOKEN)
    for path in ("/", "/api/runs", f"/runs/{key_of(shelf)}/report", "/assets/view.css", "/nothing"):
        for query in ("", "?token=", "?token=wrong"):
            answer = ask(app, path + query)
            assert answer.status_code == 403
            assert answer.text.count("\n") == 1
            assert "fedsim view" in answer.text
            assert not answer.cookies


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_cannot_use(shelf: Path) -> None:
    app = create_app([shelf], TOKEN)
    answer = ask(app, "/compare", params={"token": TOKEN, "run": "x"})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/compare?run=x"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert TOKEN not in answer.headers["set-cookie"]
    assert look(app, "/").status_code == 200
    forged = ask(app, "/", headers={"Cookie": f"{app.cookie}={TOKEN}"})
    assert forged.status_code == 403


def test_a_token_at_a_crooked_path_sends_nobody_to_another_site(shelf: Path) -> None:
    app = create_app([shelf], TOKEN)
    scope: dict[str, Any] = {"type": "http", "method": "GET", "headers": [(b"host", b"localhost")]}
    scope |= {"path": "//evil.example/", "raw_path": b"//evil.example/", "scheme": "http"}
    scope |= {"query_string": f"token={TOKEN.replace(' ', '+')}".encode(), "root_path": ""}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, None, send))  # type: ignore[arg-type]
    where = dict(sent[0]["headers"])[b"location"].decode()
    assert sent[0]["status"] == 303
    assert where.startswith("/")
    assert not where.startswith("//")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("[::1]:8000", 200),
        ("evil.example:8000", 400),
        ("127.0.0.1.evil.example", 400),
        ("localhost.evil.example:8000", 400),
        ("[::1", 400),
        ("192.168.0.7:8000", 400),
        ("0.0.0.0:8000", 400),
        ("", 400),
    ],
)
def test_only_loopback_names_are_answered(shelf: Path, host: str, status: int) -> None:
    app = create_app([shelf], TOKEN)
    cookies = ask(app, "/", params={"token": TOKEN}).cookies
    cookie = "; ".join(f"{k}={v}" for k, v in cookies.items())
    assert ask(app, "/", headers={"Host": host, "Cookie": cookie}).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
def test_only_get_is_answered(shelf: Path, method: str) -> None:
    answer = ask(create_app([shelf], TOKEN), "/", method, params={"token": TOKEN})
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET"
    assert not answer.cookies


def test_every_answer_forbids_other_sites_and_caches(shelf: Path) -> None:
    app, key = create_app([shelf], TOKEN), key_of(shelf)
    paths = ["/", "/api/runs", f"/runs/{key}", f"/runs/{key}/report", "/assets/live.js", "/nothing"]
    for answer in [*(look(app, path) for path in paths), ask(app, "/")]:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert not re.search(r"https?:|\*", policy)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_report_is_shown_as_it_is_in_an_origin_of_its_own(shelf: Path) -> None:
    app, key = create_app([shelf], TOKEN), key_of(shelf)
    answer = look(app, f"/runs/{key}/report")
    assert answer.content == (shelf / "done" / "report.html").read_bytes()
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("sandbox")
    assert "allow-same-origin" not in policy
    assert f"/runs/{key}/report" in look(app, f"/runs/{key}").text


def test_no_path_leads_out_of_the_runs_or_into_the_vault(shelf: Path) -> None:
    (shelf.parent / "secret.txt").write_text("a secret")
    app, key = create_app([shelf], TOKEN), key_of(shelf)
    truth = next(path.relative_to(shelf) for path in shelf.glob("done/vault/*/*.safetensors"))
    tries = [
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        f"/runs/{key}/../../secret.txt",
        f"/runs/{key}/%2e%2e%2f%2e%2e%2fsecret.txt",
        "/runs/..%2f..%2fsecret.txt/report",
        "/runs/%2e%2e/report",
        "/assets/../app.py",
        "/assets/%2e%2e%2fapp.py",
        f"/runs/{key}/vault",
        f"/runs/{key}/{truth.relative_to('done')}",
        f"/{truth}",
        f"/runs/{key}/spec.yaml",
        f"/runs/{key}/reconstructions/patch_solve",
        f"/compare?run={key}&run=../../secret.txt",
        f"/compare?run={key}&run={shelf.parent}",
    ]
    for path in tries:
        answer = look(app, path)
        assert answer.status_code == 404, path
        assert "a secret" not in answer.text


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def visit(app: AccessControl) -> dict[str, str]:
    """What a browser sends once it was let in with the token."""
    cookies = ask(app, "/", params={"token": TOKEN}).cookies
    return {"Cookie": "; ".join(f"{k}={v}" for k, v in cookies.items())}


def test_a_token_is_good_for_minutes_and_a_visit_for_hours(shelf: Path) -> None:
    clock = Clock()
    app = AccessControl(create_app([shelf], TOKEN).app, TOKEN, clock)
    headers = visit(app)
    clock.now += TOKEN_SECONDS - 1
    assert ask(app, "/", params={"token": TOKEN}).status_code == 303
    clock.now += 1
    late = ask(app, "/", params={"token": TOKEN})
    assert late.status_code == 403
    assert "too old" in late.text
    assert not late.cookies
    assert ask(app, "/", headers=headers).status_code == 200
    clock.now = 1000.0 + SESSION_SECONDS
    assert ask(app, "/", headers=headers).status_code == 403
    assert ask(app, "/", params={"token": TOKEN}, headers=headers).status_code == 403


def test_every_visitor_has_a_session_of_their_own_and_the_oldest_gives_way(shelf: Path) -> None:
    app = create_app([shelf], TOKEN)
    first, second = visit(app), visit(app)
    assert first != second
    assert ask(app, "/", headers=first).status_code == 200
    for _ in range(MOST_SESSIONS - 1):
        visit(app)
    assert ask(app, "/", headers=first).status_code == 403
    assert ask(app, "/", headers=second).status_code == 200


def test_the_cookie_ends_with_the_visit(shelf: Path) -> None:
    cookie = ask(create_app([shelf], TOKEN), "/", params={"token": TOKEN}).headers["set-cookie"]
    assert f"Max-Age={int(SESSION_SECONDS)}" in cookie
    assert "Domain" not in cookie


def test_a_visitor_who_comes_with_the_token_again_loses_it_from_the_address(shelf: Path) -> None:
    app = create_app([shelf], TOKEN)
    headers = visit(app)
    answer = ask(app, "/compare", params={"token": "whatever", "run": "x"}, headers=headers)
    assert (answer.status_code, answer.headers["location"]) == (303, "/compare?run=x")
    assert "set-cookie" not in answer.headers

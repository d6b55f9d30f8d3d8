"""The pages: nothing of a run is markup, and what a browser makes of them."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedsim.core.errors import RunError
from fedsim.viewer.app import create_app
from tests.viewing import ROOT, TOKEN, comparison, key_of, look, text, unfinished


def test_a_folder_without_a_run_waits_for_one(tmp_path: Path) -> None:
    page = text(look(create_app([tmp_path], TOKEN), "/"))
    assert "No run yet" in page
    with pytest.raises(RunError, match="no directory"):
        create_app([tmp_path / "missing"], TOKEN)


def test_names_from_a_run_are_text_not_markup(shelf: Path) -> None:
    crooked = shelf / '<img src=x onerror="alert(1)">'
    shutil.copytree(shelf / "done", crooked)
    root = unfinished(shelf, "<b>half</b>")
    (root / "events.jsonl").write_text(json.dumps({"kind": "<i>", "message": "<script>"}) + "\n")
    app = create_app([shelf], TOKEN)
    keys = [run["key"] for run in look(app, "/api/runs").json()["runs"]]
    paths = ["/", f"/compare?run={keys[0]}&run={keys[1]}", *(f"/runs/{key}" for key in keys)]
    for page in (look(app, path).text for path in paths):
        assert "<img src=x" not in page
        assert "<b>half" not in page
        assert "<script>" not in page


def test_the_style_uses_only_colours_that_it_has() -> None:
    own = (ROOT / "fedsim/viewer/pages/view.css").read_text()
    known = own + (ROOT / "fedsim/report/style.css").read_text()
    defined = set(re.findall(r"(--[\w-]+):", known))
    assert set(re.findall(r"var\((--[\w-]+)\)", own)) <= defined


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """A server in a thread, on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


def browse(address: str, profile: Path) -> tuple[str, str]:
    """The page as a browser has it after its scripts ran, and what it complained of."""
    quiet = [
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    ]
    seen = subprocess.run(
        [
            *("chromium", *quiet, f"--user-data-dir={profile}"),
            *("--enable-logging=stderr", "--v=0", "--window-size=1200,900"),
            *("--virtual-time-budget=6000", "--dump-dom", address),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    return seen.stdout, seen.stderr


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium on PATH")
def test_a_browser_shows_progress_that_came_after_the_page(shelf: Path, tmp_path: Path) -> None:
    root = unfinished(shelf)
    guarded = create_app([shelf], TOKEN)
    late = root / "reconstructions" / "patch_solve" / "round-0002"
    missing = next(
        path.name
        for path in (shelf / "done" / late.relative_to(root)).iterdir()
        if not (late / path.name).exists()
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/api/runs":
            shutil.copy(shelf / "done" / late.relative_to(root) / missing, late / missing)
        await guarded(scope, receive, send)

    assert "2 of 8 jobs" in text(look(guarded, "/"))
    with served(app) as address:
        page, said = browse(f"{address}/?token={TOKEN.replace(' ', '+')}", tmp_path / "profile")
    assert ">live</span>" in page
    assert "1 of 2 rounds, 3 of 8 jobs, 1 failed" in page
    assert "CONSOLE" not in said


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium on PATH")
def test_no_page_needs_sideways_scroll_on_a_phone(two: Path, tmp_path: Path) -> None:
    shelf = tmp_path / "runs"
    shutil.copytree(two, shelf)
    shutil.copytree(shelf / "plain", shelf / "done")
    root = unfinished(shelf, "a-run-with-a-name-that-is-much-too-long-for-the-screen-of-a-phone")
    guarded = create_app([shelf], TOKEN)
    compared = comparison(guarded, "plain", "noisy", "done")
    paths = ["/", f"/runs/{key_of(root)}", f"/runs/{key_of(shelf / 'plain')}", compared]
    frames = "".join(
        f'<iframe width="390" height="800" src="{p}{"&" if "?" in p else "?"}'
        f'token={TOKEN.replace(" ", "+")}"></iframe>'
        for p in paths
    )
    script = (
        "onload = () => setTimeout(() => { answer.textContent = [...document.querySelectorAll("
        "'iframe')].map(f => { const d = f.contentDocument.documentElement; return "
        "`${d.scrollWidth} ${[...d.querySelectorAll('img')].every(i => i.naturalWidth && i.alt)} "
        "${d.querySelectorAll('h1').length}`; }).join(', '); }, 500);"
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/phones":
            page = HTMLResponse(f'{frames}<p id="answer"></p><script>{script}</script>')
            await page(scope, receive, send)
        else:
            await guarded(scope, receive, send)

    with served(app) as address:
        page, said = browse(f"{address}/phones", tmp_path / "profile")
    found = re.search(r'id="answer">([^<]*)<', page)
    assert found, said
    for path, told in zip(paths, found[1].split(", "), strict=True):
        width, pictures, headings = told.split()
        assert int(width) <= 390, path
        assert (pictures, headings) == ("true", "1"), path
    assert "CONSOLE" not in said

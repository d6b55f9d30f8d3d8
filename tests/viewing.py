"""What the tests of the viewer share: a shelf of runs, and somebody who asks for pages."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp

from fedsim.viewer.access import AccessControl
from fedsim.viewer.files import Files
from fedsim.viewer.run_index import RunIndex
from fedsim.viewer.status import Status, status_of

TOKEN = "a token for tests"
ROOT = Path(__file__).parent.parent


def ask(app: ASGIApp, path: str, method: str = "GET", **options: Any) -> httpx.Response:
    """One request, without following redirects."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        base = "http://127.0.0.1:8000"
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def look(app: AccessControl, path: str) -> httpx.Response:
    """One request of somebody who was let in."""
    cookies = ask(app, "/", params={"token": TOKEN}).cookies
    return ask(app, path, headers={"Cookie": "; ".join(f"{k}={v}" for k, v in cookies.items())})


def text(answer: httpx.Response) -> str:
    """What a reader sees of a page."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", answer.text)))


def unfinished(shelf: Path, name: str = "half") -> Path:
    """A copy that looks as if it were still at work: one round, one job failed, two to come."""
    root = shelf / name
    shutil.copytree(shelf / "done", root)
    for gone in ("summary.json", "report.html", "scores.csv", "scores.parquet"):
        (root / gone).unlink()
    shutil.rmtree(root / "reconstructions" / "prior_only")
    results = sorted((root / "reconstructions/patch_solve").glob("*/*.safetensors"))
    results[-1].unlink()
    results[0].unlink()
    failure = {"job": "a job", "attack": "patch_solve", "kind": "crashed", "reason": "no memory"}
    results[0].with_suffix(".failed.json").write_text(json.dumps(failure))
    rounds = (root / "rounds.csv").read_text().splitlines()
    (root / "rounds.csv").write_text("\n".join(rounds[:2]) + "\n")
    return root


def planned(shelf: Path, name: str = "new") -> Path:
    (shelf / name).mkdir()
    shutil.copy(shelf / "done" / "spec.yaml", shelf / name / "spec.yaml")
    return shelf / name


def stands(root: Path, **options: Any) -> Status:
    return status_of(Files(), RunIndex([root]).runs()[0], **options)


def key_of(root: Path) -> str:
    return RunIndex([root]).runs()[0].key


def comparison(app: AccessControl, *names: str) -> str:
    keys = {run["name"]: run["key"] for run in look(app, "/api/runs").json()["runs"]}
    return "/compare?" + "&".join(f"run={keys[name]}" for name in names)

"""The viewer on runs that are damaged in any way: a page, never an error of the server."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import strategies as st

from fedsim.core.run import Run
from fedsim.viewer.app import create_app
from tests.fuzz.inputs import GOOD, SOME_JSON, aliases, altered, edits
from tests.fuzz.meeting import Loaders, fuzz
from tests.viewing import TOKEN, ask, look

FEW = 25
SHOWN = ("spec.yaml", "summary.json", "rounds.csv", "scores.csv", "events.jsonl", "report.html")


def pages(value: tuple[str, bytes | Callable[[bytes], bytes]], run: Run) -> None:
    """Every page of two runs, a file of one of which is another."""
    shelf = shelf_of(run)
    name, changed = value
    path = shelf / "damaged" / name
    held = path.read_bytes()
    try:
        path.write_bytes(changed if isinstance(changed, bytes) else changed(held))
        app = create_app([shelf], TOKEN)
        runs = look(app, "/api/runs").json()["runs"]
        keys = [found["key"] for found in runs]
        paths = ["/", f"/compare?run={keys[0]}&run={keys[1]}"]
        paths += [f"/runs/{key}{part}" for key in keys for part in ("", "/live", "/report")]
        for page in paths:
            answer = look(app, page)
            assert answer.status_code in (200, 400, 404)
            if not page.endswith("/report"):  # the file itself, as it lies
                answer.content.decode()
    finally:
        path.write_bytes(held)


def shelf_of(run: Run) -> Path:
    """Two copies of the run, one of them unfinished and with a name that is no text."""
    shelf = run.root.parent / "shelf"
    if not shelf.is_dir():
        shutil.copytree(run.root, shelf / "damaged")
        (shelf / "damaged" / "events.jsonl").write_text('{"kind": "x", "message": "y"}\n')
        other = shelf / os.fsdecode(b"other-\xff[bold]")
        shutil.copytree(run.root, other)
        (other / "summary.json").unlink()
        event = json.dumps({"kind": "\ud800", "message": "[/] \udcff \x1b", "round": "\ud800"})
        (other / "events.jsonl").write_text(event + "\n")
    return shelf


CONTENTS = st.one_of(
    altered(GOOD).map(lambda tree: yaml.safe_dump(tree).encode()),
    aliases().map(str.encode),
    SOME_JSON.map(str.encode),
    st.binary(max_size=60),
    st.sampled_from(
        [
            b"round,train_loss,test_accuracy\n1,1e308,0\n2,-1e308,1e-320\n",
            b'{"verdicts": [{"attack": "\\ud800", "verdict": "\\udcff", "words": "["}]}',
            b'{"verdicts": [{"attack": 1e999, "verdict": [], "images": 1e308}]}',
            b"\xff\xfe",
        ]
    ),
)
FUZZED: Loaders = {
    "pages": (st.tuples(st.sampled_from(SHOWN), st.one_of(edits(), CONTENTS)), pages),
}


def test_a_damaged_run_is_shown_as_far_as_it_can_be(run: Run) -> None:
    assert fuzz(FUZZED, "pages", FEW, run) >= 20


@pytest.mark.parametrize("odd", ["\ud800", "[/]", "%ff", "\x1b", "a" * 5000])
def test_an_odd_request_is_answered(run: Run, odd: str) -> None:
    app = create_app([shelf_of(run)], TOKEN)
    for raw in (odd.encode(errors="surrogatepass"),):
        quoted = "".join(f"%{byte:02x}" for byte in raw)
        for path in (f"/runs/{quoted}", f"/compare?run={quoted}&run=x", f"/?token={quoted}"):
            assert look(app, path).status_code in (200, 303, 400, 404)
            assert ask(app, path).status_code == 403

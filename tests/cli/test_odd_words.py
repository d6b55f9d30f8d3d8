"""Names that are no text, brackets, control characters: from the disk and the clients to the
terminal, the report and the viewer, and nothing is lost on the way."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fedsim.core.run import Run
from fedsim.viewer.app import create_app
from tests.conftest import SMALL
from tests.layouts import save_picture
from tests.viewing import TOKEN, look, text

WORDS = "[/y] \udcff \ud800 \x1b[2J [bold]"
SHOWN = r"[/y] \xff � \x1b[2J [bold]"


class _Loud(Exception):  # noqa: N818
    def __str__(self) -> str:
        return WORDS


@dataclass(frozen=True)
class Shouts:
    """An attack whose error steers the terminal, where one lets it."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size"})

    def reconstruct(self, view: Any, *, device: Any, progress: Any) -> Any:
        raise _Loud


def named(folder: Path, name: bytes) -> Path:
    return folder / os.fsdecode(name)


def test_pictures_and_runs_of_any_name_are_audited_and_shown(run_cli, tmp_path: Path) -> None:
    tree = named(tmp_path, b"tree-\xff[bold]")
    for number in range(16):
        folder = named(tree, b"class-\xe9[") if number % 2 else tree / "other"
        save_picture(folder / f"{number}.png", number)
    named(tree / "other", b"[bold]\xfe.png").write_bytes(b"no picture")
    link = tmp_path / "tree"  # a spec is text: what is in the tree need not be
    link.symlink_to(tree)
    root = named(tmp_path, b"run-\xff[bold]")
    words = [*SMALL, "data.name=imagefolder", f"data.path={link}", "data.clients=4"]
    code, out, err = run_cli("audit", "-o", root, *words, "audit.victims=1")
    assert code == 0
    assert r"run-\xff[bold]/report.html" in out
    assert r"1 damaged picture was skipped: other/[bold]\xfe.png" in err
    run = Run.open(root)
    page = run.report.read_bytes().decode()
    assert r"[bold]\xfe.png" in page
    code, out, _ = run_cli("report", root)
    assert code == 0
    app = create_app([tmp_path], TOKEN)
    (shown,) = look(app, "/api/runs").json()["runs"]
    assert (shown["name"], shown["state"]) == (r"run-\xff[bold]", "finished")
    for path in ("/", f"/runs/{shown['key']}", f"/runs/{shown['key']}/live"):
        answer = look(app, path)
        assert answer.status_code == 200
        assert r"run-\xff[bold]" in text(answer) or path.endswith("/live")


def test_a_spec_that_names_a_path_that_is_no_text_is_one_sentence(run_cli, tmp_path: Path) -> None:
    odd = os.fsdecode(b"data.path=no/such\xff")
    code, _, err = run_cli("audit", "data.name=imagefolder", odd, "-o", tmp_path / "run")
    assert code == 2
    assert r"no/such\xff" in err


@pytest.mark.parametrize("path", ["no/such[/y]", "no/such[bold]", "no/such[", "[/]"])
def test_brackets_in_a_path_are_shown_as_they_are(run_cli, path: str) -> None:
    code, _, err = run_cli("audit", "data.name=imagefolder", f"data.path='{path}'")
    assert code == 1
    assert path in err


def test_what_a_client_says_reaches_report_and_terminal_as_text(run_cli, tmp_path: Path) -> None:
    run_cli("audit", "-o", tmp_path / "run", *SMALL, "audit.victims=1")
    run = Run.open(tmp_path / "run")
    run.note("client_failed", f"client 3: {WORDS}", round=1, client=3)
    code, _, _ = run_cli("report", run.root)
    assert code == 0
    assert f"client 3: {SHOWN}" in run.report.read_text()
    code, _, err = run_cli("audit", "--resume", run.root)
    assert code == 0
    assert f"note: round 1: client 3: {SHOWN}" in err


def test_events_that_hold_half_a_pair_lose_nothing(run_cli, tmp_path: Path) -> None:
    run_cli("audit", "-o", tmp_path / "run", *SMALL, "audit.victims=1")
    run = Run.open(tmp_path / "run")
    event = {"kind": "client\ud800", "message": WORDS, "round": 1}
    (run.root / "events.jsonl").write_text(json.dumps(event) + "\n")
    code, _, err = run_cli("audit", "--resume", run.root)
    assert code == 0
    assert SHOWN in err
    assert r"\xff" in run.report.read_text()
    assert run.summary["events"][0]["kind"] == "client\ud800"
    app = create_app([tmp_path], TOKEN)
    (run.root / "summary.json").unlink()  # a page that lists events
    (shown,) = look(app, "/api/runs").json()["runs"]
    assert r"\xff" in look(app, f"/runs/{shown['key']}").text
    code, out, _ = run_cli("run", "--resume", run.root, "--json")
    assert code == 0
    assert json.loads(out)["events"][0]["message"] == WORDS


def test_a_failed_job_may_say_anything(run_cli, tmp_path: Path) -> None:
    attacks = "attacks=[{name: 'tests.cli.test_odd_words:Shouts'}]"
    code, _, err = run_cli("audit", "-o", tmp_path / "run", *SMALL, attacks, "audit.victims=1")
    assert code == 3
    assert r"[/y] \xff" in err
    assert r"\x1b[2J" in err
    assert "\x1b[2J" not in err
    assert r"\xff" in Run.open(tmp_path / "run").report.read_text()

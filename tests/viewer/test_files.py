"""Files of a run: read again when they change, never through a link or a pipe."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fedsim.viewer.app import create_app
from fedsim.viewer.files import Files
from fedsim.viewer.run_index import RunIndex
from fedsim.viewer.status import status_of
from tests.viewing import TOKEN, key_of, look, stands, text, unfinished


def test_a_file_that_changes_is_read_again(shelf: Path) -> None:
    root, files = unfinished(shelf), Files()
    place = RunIndex([root]).runs()[0]
    assert status_of(files, place).rounds_done == 1
    shutil.copy(shelf / "done" / "rounds.csv", root / "rounds.csv")
    assert status_of(files, place).rounds_done == 2


def test_a_link_out_of_the_run_is_not_followed(shelf: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.html"
    secret.write_text("a secret")
    root = shelf / "done"
    (root / "report.html").unlink()
    (root / "report.html").symlink_to(secret)
    (shelf / "elsewhere").symlink_to(tmp_path)
    app, key = create_app([shelf], TOKEN), key_of(shelf)
    assert look(app, f"/runs/{key}/report").status_code == 404
    assert [run["name"] for run in look(app, "/api/runs").json()["runs"]] == ["done"]
    (root / "summary.json").unlink()
    (root / "summary.json").symlink_to(secret)
    assert "leaves the run's directory" in text(look(create_app([shelf], TOKEN), "/"))


def test_a_pipe_in_the_place_of_a_report_stops_nobody(shelf: Path) -> None:
    (shelf / "done" / "summary.json").unlink()
    os.mkfifo(shelf / "done" / "summary.json")
    assert stands(shelf).state == "damaged"

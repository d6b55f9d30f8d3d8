"""The board's commands, as a user types them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedsim.board import write_submission
from fedsim.core.run import Run
from tests.board.conftest import images_of
from tests.canned import add_suite


@pytest.fixture
def measured(small_run: Run, tmp_path: Path) -> Run:
    shutil.copytree(small_run.root, tmp_path / "run")
    return add_suite(Run.open(tmp_path / "run"))


def test_a_run_is_published_attacked_by_another_and_shown(
    run_cli, measured: Run, tmp_path: Path
) -> None:
    code, out, err = run_cli("board", "export", measured.root, "-o", tmp_path / "out")
    assert (code, "published: " in out) == (0, True)
    assert "can be guessed" in err
    file = tmp_path / "mine.safetensors"
    write_submission(file, images_of(measured, 0.05), tmp_path / "out", "mine")
    words = ("--name", "Somebody", "--link", "https://example.org")
    code, out, _ = run_cli("board", "submit", measured.root, file, *words, "--json")
    assert code == 0
    assert json.loads(out)["name"] == "Somebody"
    assert len(json.loads(out)["pictures"]) == 4
    code, out, _ = run_cli("board", "submit", measured.root, file, *words)
    assert (code, "mine by Somebody is entered" in out) == (0, True)
    code, out, _ = run_cli("board", "build", measured.root, "-o", tmp_path / "board", "--json")
    told = json.loads(out)
    assert code == 0
    assert told["rows"][0]["submissions"] == 1
    assert "Somebody" in Path(told["page"]).read_text()


def test_a_run_that_does_not_enter_is_told_and_the_others_are_shown(
    run_cli, measured: Run, small_run: Run, tmp_path: Path
) -> None:
    roots = (measured.root, small_run.root)
    code, out, err = run_cli("board", "build", *roots, "-o", tmp_path / "board", "--redact")
    assert code == 3
    assert "board-redacted.html" in out
    assert "refused: " in err
    assert "standard suite" in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["build", "nowhere", "-o", "board"], "no run enters the board"),
        (["submit", "nowhere", "f", "--name", "me"], "holds no run"),
        (["export", "nowhere", "-o", "out"], "holds no run"),
    ],
)
def test_a_users_mistake_is_one_sentence(
    run_cli, tmp_path: Path, monkeypatch, words: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run_cli("board", *words)
    assert code == 1
    assert expected in err
    assert "Traceback" not in err


def test_a_file_that_is_no_submission_is_one_sentence(
    run_cli, measured: Run, tmp_path: Path
) -> None:
    (tmp_path / "f").write_text("not one")
    code, _, err = run_cli("board", "submit", measured.root, tmp_path / "f", "--name", "me")
    assert code == 1
    assert "is no safetensors file" in err
    code, _, err = run_cli("board", "submit", measured.root, tmp_path / "f", "--name", "<b>")
    assert code == 1
    assert "is not one of up to 80 letters" in err

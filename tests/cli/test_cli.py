"""The command line: a user's mistake is one sentence, never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["audit", "absent.yaml"], 2, "no spec file"),
        (["audit", "train.round=3"], 2, "did you mean 'rounds'"),
        (["audit", "train.rounds=x"], 2, "train.rounds"),
        (["audit", "attacks=[{name: patch_slove}]"], 2, "did you mean 'patch_solve'"),
        (["audit", "data.name=imagefolder", "data.path=nowhere"], 1, "nowhere"),
        (["audit", "--resume", "nowhere"], 1, "holds no run"),
        (["attack", "nowhere", "--attack", "patch_solve"], 1, "no observation"),
        (["attack", "nowhere"], 2, "--attack NAME"),
        (["report", "nowhere"], 1, "holds no run"),
        (["list", "atacks"], 2, "no list of"),
        (["frobnicate"], 2, "frobnicate"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_a_code(
    run_cli, tmp_path: Path, monkeypatch, words: list[str], code: int, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    got, _, err = run_cli(*words)
    assert got == code
    assert expected in err
    assert "Traceback" not in err

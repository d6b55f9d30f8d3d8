"""The commands that only look: list, doctor, lint."""

from __future__ import annotations

import json
import sys

import pytest

from fedsim.cli import main
from tests.conftest import SMALL


def test_list_and_doctor_answer(run_cli) -> None:
    code, out, _ = run_cli("list", "--json")
    assert code == 0
    assert {"patch_solve", "inverting_gradients", "prior_only"} <= json.loads(out)["attacks"].keys()
    code, out, _ = run_cli("doctor", "--json")
    assert code == 0
    assert {"torch", "device", "ray", "LPIPS", "data"} <= json.loads(out).keys()
    assert run_cli("list")[0] == run_cli("doctor")[0] == 0


def test_the_command_tells_and_ends_with_the_code(capsys, monkeypatch) -> None:
    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fedsim", "lint", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, capsys.readouterr().out

    code, told = run(*SMALL)
    assert code == 5
    assert "exact-inversion" in told
    assert "train.batch_size=8" in told
    code, told = run(*SMALL, "--json", "train.batch_size=4")
    found = json.loads(told)
    assert code == found["exit_code"] == 4
    assert [f["rule"] for f in found["findings"] if f["severity"] == "likely"] == ["labels"]
    code, told = run(*SMALL, "train.batch_size=4", "--ignore", "labels")
    assert code == 0
    assert run(*SMALL, "--ignore", "label")[0] == 2
    assert run(*SMALL, "train.batch_sice=4")[0] == 2

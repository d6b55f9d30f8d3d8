"""One command, as a user types it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedsim.cli import main


def fedsim(*words: str | Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> tuple:
    """Exit code, standard output and standard error of one command."""
    monkeypatch.setattr(sys, "argv", ["fedsim", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        main()
    captured = capsys.readouterr()
    return stop.value.code, captured.out, " ".join(captured.err.split())


@pytest.fixture
def run_cli(capsys, monkeypatch):
    return lambda *words: fedsim(*words, capsys=capsys, monkeypatch=monkeypatch)

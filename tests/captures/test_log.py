"""The log of a capture: whole lines are read, damaged ones are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.captures.log import (
    Head,
    Messages,
    append_messages,
    is_capture,
    read_head,
    read_messages,
    remembered,
    write_head,
)
from fedsim.core.errors import RunError


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert not is_capture(tmp_path)
    write_head(tmp_path, Head(began=1.0, host="here", classes=10))
    assert is_capture(tmp_path)
    assert read_head(tmp_path).classes == 10
    for number in (1, 2):
        append_messages(tmp_path, Messages(round=number, began=0, ended=1))
    assert [m.round for m in read_messages(tmp_path)[0]] == [1, 2]


def test_half_a_line_costs_its_round_alone(tmp_path: Path) -> None:
    for number in (1, 2):
        append_messages(tmp_path, Messages(round=number, began=0, ended=1))
    path = tmp_path / "messages.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    rounds, damaged = read_messages(tmp_path)
    assert [m.round for m in rounds] == [1]
    assert damaged == 1


def test_a_directory_without_a_capture_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no capture"):
        read_head(tmp_path)
    (tmp_path / "capture.json").write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        read_head(tmp_path)


def test_a_run_that_nobody_captured_is_not_remembered() -> None:
    assert remembered(123) == {}

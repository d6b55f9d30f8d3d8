"""Child processes: told apart from others of the same number, and ended with all they started."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from fedsim.cluster.processes import (
    Child,
    answers,
    began,
    child_of,
    end,
    free_ports,
    last_words,
    said,
    spawn,
)

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_process_is_ended_with_what_it_started(tmp_path: Path) -> None:
    process = spawn([sys.executable, "-c", PARENT], tmp_path / "log", os.environ)
    try:
        until = time.monotonic() + 30
        while not (words := said(tmp_path / "log").split()) and time.monotonic() < until:
            time.sleep(0.05)
        parent, grandchild = child_of(process), int(words[0])
        assert parent.lives
        assert Child(grandchild, began(grandchild)).lives
        end(parent)
        assert not parent.lives
        assert began(grandchild) is None
    finally:
        process.kill()
        process.wait()


def test_another_process_of_the_same_number_is_not_the_one() -> None:
    moment = began(os.getpid())
    assert moment is not None
    assert Child(os.getpid(), moment).lives
    assert Child(os.getpid(), moment + 2).lives  # a clock that was set right
    assert not Child(os.getpid(), moment - 3600).lives
    assert not Child(os.getpid(), None).lives
    assert Child.read({"pid": "7", "began": "1.5"}) == Child(7, 1.5)


@pytest.mark.parametrize("pid", [0, 1, -1, "-7", True, 7.5, 1e400, 2**31, "x", None])
def test_what_is_no_number_of_a_child_is_refused(pid: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        Child.read({"pid": pid, "began": None})


def test_free_ports_are_free_and_differ() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3
    assert not any(answers(port) for port in ports)


def test_the_last_words_of_a_log_are_without_colours(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\n\x1b[31mno memory\x1b[0m\n---\n\n\xff\n")
    assert last_words(log) == "no memory"
    log.write_bytes(b"\n---\n")
    assert last_words(log) == "it said nothing"

"""Bound: what ends with the process that started it, and what does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedsim.cluster.bound import bound
from fedsim.cluster.processes import began

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux alone does it")

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
PARENT = """
import os, sys, time
from pathlib import Path
from fedsim.cluster.processes import spawn
outlives = sys.argv[1] == "outlives"
print(spawn(sys.argv[3:], Path(sys.argv[2]), os.environ, outlives=outlives).pid, flush=True)
time.sleep(600)
"""


def test_a_program_is_what_it_would_be_with_its_words_and_its_end() -> None:
    code = "import os, sys; print(os.environ['MARK'], sys.argv[1:]); sys.exit(7)"
    done = subprocess.run(
        bound([sys.executable, "-c", code, "a b", "-x"]),
        capture_output=True,
        text=True,
        env=os.environ | {"MARK": "told"},
    )
    assert (done.returncode, done.stdout) == (7, "told ['a b', '-x']\n")


def test_a_program_that_is_not_there_is_one_line() -> None:
    done = subprocess.run(bound(["no-such-program"]), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "no-such-program: No such file or directory\n")


def test_nothing_is_started_for_a_parent_that_is_gone() -> None:
    command = bound([sys.executable, "-c", "print('started')"])
    command[command.index(str(os.getpid()))] = "1"
    assert subprocess.run(command, capture_output=True, text=True).stdout == ""


@pytest.mark.parametrize("lot", ["outlives", "ends"])
def test_a_child_ends_with_a_parent_that_is_killed_unless_it_is_to_outlive_it(
    lot: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PARENT, lot, str(tmp_path / "log"), *SLEEPER]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        time.sleep(0.5)
        parent.kill()
        parent.wait()
        until = time.monotonic() + (20 if lot == "ends" else 1)
        while began(child) is not None and time.monotonic() < until:
            time.sleep(0.05)
        assert (began(child) is None) == (lot == "ends")
    finally:
        if began(child) is not None:
            os.kill(child, signal.SIGKILL)


def test_what_a_child_started_ends_with_it_also_where_it_is_left_behind(tmp_path: Path) -> None:
    run = "subprocess.Popen(sys.argv[1:], start_new_session=True)"
    code = f"import subprocess, sys; print({run}.pid, flush=True)"
    careless = [sys.executable, "-c", f"{code}; import time; time.sleep(600)", *SLEEPER]
    command = [sys.executable, "-c", PARENT, "ends", str(tmp_path / "log"), *careless]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 20
        while not (words := (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""):
            assert time.monotonic() < until
            time.sleep(0.05)
        grandchild = int(words)
        assert began(grandchild) is not None
    finally:
        parent.kill()
        parent.wait()
    while began(grandchild) is not None and time.monotonic() < until:
        time.sleep(0.05)
    assert began(grandchild) is None


def test_a_program_ends_with_its_supervisor_that_is_killed(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    supervisor = subprocess.Popen(
        bound([sys.executable, "-c", code]), stdout=subprocess.PIPE, text=True
    )
    assert supervisor.stdout is not None
    program = int(supervisor.stdout.readline())
    supervisor.kill()
    supervisor.wait()
    until = time.monotonic() + 20
    while began(program) is not None and time.monotonic() < until:
        time.sleep(0.05)
    assert began(program) is None

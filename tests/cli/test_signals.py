"""Signals: whoever ends a command ends what it started with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedsim.cli.signals import KINDS, Stopped, stoppable
from fedsim.cluster.processes import began

SLEEPER = "import time; time.sleep(600)"
# The console script with one command more, which starts a child as a deployment does.
SCRIPT = f"""
import sys, time
from pathlib import Path
from fedsim.cli import app, main
from fedsim.deploy.flower import Processes

@app.command()
def sleep(folder: Path) -> None:
    processes = Processes(record=folder / "processes.json")
    try:
        processes.start("sleeper", [sys.executable, "-c", {SLEEPER!r}], folder)
        print(processes.running["sleeper"][0].pid, flush=True)
        time.sleep(600)
    finally:
        time.sleep(0.5)
        processes.stop()

main()
"""


@contextmanager
def sleeping(folder: Path, *before: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A command at work, and its child."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", SCRIPT, "sleep", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    child = 0
    try:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert began(child) is not None
        yield process, child
    finally:
        process.kill()
        process.wait()
        if child and not is_gone(child):
            os.kill(child, signal.SIGKILL)


def is_gone(pid: int) -> bool:
    until = time.monotonic() + 20
    while began(pid) is not None and time.monotonic() < until:
        time.sleep(0.05)
    return began(pid) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_that_is_told_to_end_ends_its_children_and_says_so(
    kind: signal.Signals, tmp_path: Path
) -> None:
    with sleeping(tmp_path) as (process, child):
        process.send_signal(kind)
        time.sleep(0.2)
        process.send_signal(kind)  # a second one does not cut it short
        _, err = process.communicate(timeout=60)
        assert process.returncode == 128 + kind
        assert err == f"stopped by {kind.name}.\n"
        assert began(child) is None
    assert not (tmp_path / "processes.json").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux alone does it")
def test_the_children_of_a_command_that_was_killed_end_as_well(tmp_path: Path) -> None:
    with sleeping(tmp_path) as (process, child):
        process.kill()
        process.wait()
        assert is_gone(child)


def test_what_is_started_without_a_terminal_in_mind_outlives_it(tmp_path: Path) -> None:
    with sleeping(tmp_path, "nohup") as (process, child):
        process.send_signal(signal.SIGHUP)
        time.sleep(1)
        assert process.poll() is None
        assert began(child) is not None


@pytest.fixture
def _usual_signals() -> Iterator[None]:
    """As a command begins; another test's Ray may have set its own."""
    before = {kind: signal.signal(kind, signal.SIG_DFL) for kind in KINDS}
    yield
    for kind, handler in before.items():
        signal.signal(kind, handler)


@pytest.mark.usefixtures("_usual_signals")
def test_signals_are_afterwards_what_they_were() -> None:
    with stoppable() as asked:
        with pytest.raises(KeyboardInterrupt):  # as a library may take it for Ctrl-C
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped, match="stopped by SIGTERM"):
            asked.check()
    assert [signal.getsignal(kind) for kind in KINDS] == [signal.SIG_DFL] * 2


@pytest.mark.usefixtures("_usual_signals")
def test_a_signal_that_was_ignored_still_is() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stoppable() as asked:
        os.kill(os.getpid(), signal.SIGHUP)
        asked.check()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_elsewhere_than_in_the_main_thread_signals_are_left_alone() -> None:
    seen: list[object] = []

    def work() -> None:
        with stoppable():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]

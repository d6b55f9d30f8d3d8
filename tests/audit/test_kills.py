"""Kills, signals, full disks and other processes: what was cut short is done again, and ends with
the scores of a run that met none of it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedsim.audit.stages import audit
from fedsim.campaign.progress import Silent
from fedsim.core.errors import RunError
from fedsim.core.run import Run, list_observations
from fedsim.federation.checkpoint import read_checkpoint
from tests.conftest import SMALL, small_spec
from tests.planted import (
    DAMAGE,
    TINY,
    KilledError,
    assert_same,
    at_write,
    full,
    killed,
    killed_while_writing,
    resumed,
    tiny_spec,
)

pytestmark = pytest.mark.usefixtures("quick_report")


# -- at every write -----------------------------------------------------------------------------


def survives(fault: Callable[[Path], None], control: Run, root: Path, step: int = 1) -> int:
    """The fault at every ``step``-th write of a run, each followed by a resumption."""
    faults = 0
    for number in itertools.count(1, step):
        run = root / str(number)
        try:
            with at_write(number, fault) as written:
                audit(tiny_spec(), run)
        except (KilledError, OSError, RunError):
            faults += 1
        if len(written) < number:
            return faults
        assert_same(audit(tiny_spec(), run), control)
        shutil.rmtree(run)
    raise AssertionError


@pytest.mark.slow
def test_a_run_killed_between_any_two_writes_goes_on(tiny_run: Run, tmp_path: Path) -> None:
    files = survives(killed, tiny_run, tmp_path)
    assert files >= 20


def test_a_run_killed_while_it_writes_leaves_nothing_behind(tiny_run: Run, tmp_path: Path) -> None:
    assert survives(killed_while_writing, tiny_run, tmp_path, step=3) >= 7


@pytest.mark.slow
def test_a_disk_full_at_any_write_loses_nothing_that_was_done(
    tiny_run: Run, tmp_path: Path
) -> None:
    assert survives(full, tiny_run, tmp_path, step=2) >= 8


def test_a_full_vault_stops_the_run_and_fails_no_client(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("fedsim.core.vault.write_atomically", lambda path, *more: full(path))
        with pytest.raises(RunError, match=r"vault cannot be written: No space left on device\.$"):
            audit(tiny_spec(), tmp_path / "run")
    assert Run(tmp_path / "run").events() == []
    assert not Run(tmp_path / "run").checkpoint.exists()
    assert_same(resumed(tmp_path / "run"), tiny_run)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system takes a root who may")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_really_full_is_an_error_and_more_room_goes_on(
    small_disk: Path, tiny_run: Run
) -> None:
    with pytest.raises((OSError, RunError), match="No space left"):
        audit(tiny_spec(), small_disk / "run")
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert_same(resumed(small_disk / "run"), tiny_run)


def test_a_read_only_directory_is_one_sentence(small_disk: Path, tiny_run: Run) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    run = shutil.copytree(tiny_run.root, small_disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for root in (run, small_disk / "new"):
        with pytest.raises(RunError, match="cannot be written: Read-only file system"):
            audit(tiny_spec(), root)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert_same(resumed(run), tiny_run)


# -- signals and other processes ----------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from fedsim.audit.stages import audit
from fedsim.core import files
from tests.conftest import small_spec

replacing = files._replacing
def fatal(path, mode):
    if path.name == sys.argv[2]:
        (path.parent / f".{path.name}.k3x{files.UNFINISHED}").write_bytes(b"half of")
        if sys.argv[3] == "SLEEP":
            print("here", flush=True)
            time.sleep(600)
        os.kill(os.getpid(), getattr(signal, sys.argv[3]))
    return replacing(path, mode)
files._replacing = fatal
audit(small_spec(*sys.argv[4:]), Path(sys.argv[1]))
"""


def process(root: Path, file: str, signal_: str) -> subprocess.Popen[str]:
    """A run in a process of its own, that meets ``signal_`` when it writes ``file``."""
    words = [sys.executable, "-c", PROGRAM, str(root), file, signal_, *TINY]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("signal_", ["SIGTERM", "SIGINT"])
def test_a_process_that_meets_a_signal_while_writing_is_gone_on_from(
    signal_: str, tiny_run: Run, tmp_path: Path
) -> None:
    with process(tmp_path / "run", "checkpoint.safetensors", signal_) as driver:
        assert driver.wait(120) != 0
    assert not (tmp_path / "run" / "scores.csv").exists()
    assert_same(resumed(tmp_path / "run"), tiny_run)


def test_a_second_process_is_told_of_the_first_and_takes_over_when_that_is_dead(
    tiny_run: Run, tmp_path: Path
) -> None:
    with process(tmp_path / "run", "checkpoint.safetensors", "SLEEP") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "here\n"
        with pytest.raises(RunError, match=rf"another process \({first.pid}\) is at work in"):
            audit(tiny_spec(), tmp_path / "run")
        first.send_signal(signal.SIGKILL)
    assert (tmp_path / "run" / "run.lock").read_text() == f"{first.pid}\n"
    assert_same(resumed(tmp_path / "run"), tiny_run)


@pytest.mark.slow
def test_a_killed_client_and_a_killed_worker_change_no_score(tmp_path: Path) -> None:
    attacks = [
        {"name": "tests.faults:KillsItsWorker", "marker": str(tmp_path / "worker")},
        {"name": "patch_solve"},
    ]
    defense = {"name": "tests.faults:KillsItsClient", "marker": str(tmp_path / "client")}
    words = [f"attacks={json.dumps(attacks)}", f"defenses={json.dumps([defense])}"]
    spec = small_spec(*SMALL, *words, "engine={kind: ray, device: cpu}")
    run = audit(spec, tmp_path / "run")
    assert (tmp_path / "worker").exists()
    assert [event["kind"] for event in run.events()] == ["client_revived"]
    control = audit(small_spec(*SMALL, *words), tmp_path / "control")
    assert len(list_observations(run.observations)) == 4
    assert_same(run, control)


# -- clocks and strategies ----------------------------------------------------------------------


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_clocks_that_jump_change_no_score(
    jump: float, tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("time", "perf_counter"):
        clock, calls = getattr(time, name), itertools.count()
        monkeypatch.setattr(time, name, lambda clock=clock, n=calls: clock() + jump * next(n))
    with at_write(12, killed), pytest.raises(KilledError):
        audit(tiny_spec(), tmp_path / "run")
    assert_same(resumed(tmp_path / "run"), tiny_run)


class StopAfterOne(Silent):
    def round_done(self, row: dict) -> None:
        raise KilledError


@pytest.mark.parametrize("strategy", ["FedAdam", "FedYogi", "FedAdagrad", "FedAvgM"])
def test_a_strategy_with_a_memory_goes_on_where_it_was(strategy: str, tmp_path: Path) -> None:
    options = "{server_momentum: 0.9}" if strategy == "FedAvgM" else "{eta: 0.01}"
    spec = small_spec(
        *TINY, "train.rounds=3", f"train.strategy={strategy}", f"train.strategy_options={options}"
    )
    whole = audit(spec, tmp_path / "whole")
    with pytest.raises(KilledError):
        audit(spec, tmp_path / "cut", watch=StopAfterOne())
    cut = Run(tmp_path / "cut")
    assert len(read_checkpoint(cut).rows) == 1
    assert read_checkpoint(cut).state
    assert_same(resumed(cut.root), whole)
    one, two = (read_checkpoint(run) for run in (whole, cut))
    assert all((one.arrays[name] == two.arrays[name]).all() for name in one.arrays)
    assert one.state.keys() == two.state.keys()
    DAMAGE["half"](cut.observations / "round-0002" / "client-0001.safetensors")
    assert_same(resumed(cut.root), whole)
    again = read_checkpoint(cut)
    assert all((one.arrays[name] == again.arrays[name]).all() for name in one.arrays)
    assert "from 1 on" in cut.events()[0]["message"]

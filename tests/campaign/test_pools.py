"""Pools of workers: every job once, every failure with its reason."""

from __future__ import annotations

import json
import queue
import time
from pathlib import Path

import pytest

from fedsim.audit.stages import audit
from fedsim.campaign import pulse, watchdog
from fedsim.campaign.jobs import Job
from fedsim.campaign.pools import Home, RayPool, SealedWorker
from fedsim.campaign.progress import Silent
from fedsim.core.attack import Reconstruction
from fedsim.core.keyring import VARIABLE, key_folders
from fedsim.core.run import Run
from fedsim.core.spec import Component
from tests.conftest import small_spec
from tests.planted import TINY, assert_same
from tests.staging import short_report


def test_a_feeder_that_cannot_write_ends_the_wait_with_its_reason(tmp_path: Path) -> None:
    class FullDisk(RayPool):
        def __init__(self) -> None:  # without Ray: the feeding alone is under test
            self.jobs, self.broken = queue.Queue(), None

        def _home(self, actor: object, seconds: float | None = None) -> Home:
            return Home("here", "1")

        def _settle(self, job: Job, attempt: object) -> None:
            raise OSError(28, "No space left on device")

    pool = FullDisk()
    pool.jobs.put(Job(tmp_path, tmp_path, 1, 0, Component(name="x"), "x", 0))
    pool._feed(None)
    with pytest.raises(OSError, match="No space left"):
        pool.drain()


def test_a_worker_for_attacks_alone_is_sealed_and_told_of_no_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sealed: list[bool] = []
    monkeypatch.setattr("fedsim.campaign.pools.seal_process", lambda: sealed.append(True))
    monkeypatch.setenv(VARIABLE, "/somewhere")
    SealedWorker(1)
    assert sealed == [True]
    assert key_folders() == (Path("/dev/null"),)


@pytest.mark.slow
def test_attacks_on_ray_run_in_processes_that_are_sealed(tmp_path: Path) -> None:
    spec = small_spec(
        "attacks=[{name: 'tests.faults:SaysKeys'}]",
        "train.rounds=1",
        "engine={kind: ray, device: cpu}",
    )
    run = audit(spec, tmp_path / "run")
    results = [Reconstruction.load(path) for path in run.reconstructions.glob("SaysKeys/*/*")]
    assert [result.notes for result in results] == [["/dev/null", "True"]] * 2
    assert run.scores["canary"].max() < 1e-4, "clients on Ray had the key, and so had scoring"


# -- attacks that hang --------------------------------------------------------------------------


class Failures(Silent):
    """Keeps what it is told of jobs that failed."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def finished(self, job: object, failure: str | None) -> None:
        if failure:
            self.told.append(failure)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an attack says that it hangs; to whoever watches, days pass each time it does."""
    path = tmp_path / "hangs-"

    def clock() -> float:
        hung = len(list(path.parent.glob(f"{path.name}*")))
        return time.monotonic() + 1e6 * hung

    monkeypatch.setattr(pulse, "clock", clock)
    monkeypatch.setattr(watchdog, "TRY_SECONDS", 0.05)
    monkeypatch.setattr("fedsim.report.write_report", short_report)
    return path


def hanging(marker: Path, engine: str, **params: object) -> tuple[list[str], list[str]]:
    """The words of a spec with an attack that hangs, and of the same with one that does not."""
    words = []
    for where in (marker, marker.with_name("never")):
        hangs = {"name": "tests.faults:Hangs", "marker": str(where), **params}
        attacks = [hangs, {"name": "patch_solve"}]
        words.append([*TINY, f"attacks={json.dumps(attacks)}", "audit.victims=2", engine])
    return words[0], words[1]


def check_hanging(marker: Path, root: Path, engine: str, how: str) -> None:
    """It hangs once: ended, told, tried again, and the scores are those of one that does not."""
    words, calm = hanging(marker, engine, how=how)
    (marker.parent / "never0").touch()  # its first try is over
    run = audit(small_spec(*words), root / "run")
    (event,) = run.events()
    assert event["kind"] == "attack_hung"
    assert "was ended and is tried again: it " in event["message"]
    assert event["message"].startswith(f"Hangs on round-0001/client-000{event['client']}, trial 0")
    assert run.summary["failed_jobs"] == []
    assert_same(run, audit(small_spec(*calm), root / "calm"))


@pytest.mark.parametrize("how", ["loop", "sleep", "reports"])
def test_an_attack_that_hangs_here_is_ended_and_tried_again(
    how: str, marker: Path, tmp_path: Path
) -> None:
    check_hanging(marker, tmp_path, "engine={kind: inline, device: cpu}", how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["loop", "sleep", "reports"])
def test_an_attack_that_hangs_on_a_worker_is_ended_and_tried_again(
    how: str, marker: Path, tmp_path: Path
) -> None:
    check_hanging(marker, tmp_path, "engine={kind: ray, device: cpu}", how)


def check_hopeless(run: Run, watch: Failures) -> None:
    """It always hangs: a failure with its reason, no result, and the others are done."""
    told = [event["message"] for event in run.events() if event["kind"] == "attack_hung"]
    assert len(told) == 4
    assert sum("is tried again" in message for message in told) == 2
    assert sum("given up" in message for message in told) == 2
    failed = run.summary["failed_jobs"]
    assert [job["kind"] for job in failed] == ["hung", "hung"]
    assert all("no sign of life for 3600 s" in job["reason"] for job in failed)
    assert len(watch.told) == 2
    verdicts = {entry["attack"]: entry for entry in run.summary["verdicts"]}
    assert verdicts["Hangs"]["verdict"] == "NO RESULT"
    assert "no sign of life" in verdicts["Hangs"]["words"]
    assert verdicts["patch_solve"]["images"] == 2


def test_an_attack_that_always_hangs_costs_its_own_jobs_only(marker: Path, tmp_path: Path) -> None:
    words, _ = hanging(marker, "engine={kind: inline, device: cpu}", once=False)
    watch = Failures()
    check_hopeless(audit(small_spec(*words), tmp_path / "run", watch=watch), watch)


@pytest.mark.slow
def test_on_workers_as_well_it_costs_its_own_jobs_only(marker: Path, tmp_path: Path) -> None:
    words, _ = hanging(marker, "engine={kind: ray, device: cpu}", once=False, how="sleep")
    watch = Failures()
    check_hopeless(audit(small_spec(*words), tmp_path / "run", watch=watch), watch)

"""Pools of workers: every job once, every failure with its reason."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from fedsim.audit.stages import audit
from fedsim.campaign.jobs import Job
from fedsim.campaign.pools import Home, RayPool, SealedWorker
from fedsim.core.attack import Reconstruction
from fedsim.core.keyring import VARIABLE, key_folders
from fedsim.core.spec import Component
from tests.conftest import small_spec


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

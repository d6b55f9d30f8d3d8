"""Pools of workers: every job once, every failure with its reason."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from fedsim.campaign.jobs import Job
from fedsim.campaign.pools import Home, RayPool
from fedsim.core.spec import Component


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

"""Jobs: one attack on one observation, cut short and gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedsim.campaign.jobs import Handout, Job, perform
from fedsim.campaign.plan import victims
from fedsim.core.knowledge import Secrets
from fedsim.core.run import Run
from fedsim.core.spec import Component


class StoppedError(Exception):
    pass


def test_a_long_attack_goes_on_where_its_worker_died(small_run: Run, tmp_path: Path) -> None:
    params = {"steps": 20, "checkpoint_seconds": 0.0}
    component = Component(name="inverting_gradients", **params)
    round_, client = victims(small_run.spec)[0]
    handout = Handout(small_run.spec.threat, 0, "cpu")

    def job(folder: str) -> Job:
        root = tmp_path / folder
        return Job(small_run.observations, root, round_, client, component, "ig", 0)

    def stops(done: int, total: int, loss: float | None = None) -> None:
        if done >= 12:
            raise StoppedError

    whole = perform(job("whole"), handout, Secrets())
    with pytest.raises(StoppedError):
        perform(job("cut"), handout, Secrets(), stops)
    assert job("cut").notebook.is_file()
    again = perform(job("cut"), handout, Secrets())
    assert any("resumed at step" in note for note in again.notes)
    assert torch.equal(again.images, whole.images)
    assert not job("cut").notebook.exists()

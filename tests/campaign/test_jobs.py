"""Jobs: one attack on one observation, cut short and gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedsim.campaign.jobs import Handout, Job, perform
from fedsim.campaign.plan import victims
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import Secrets
from fedsim.core.run import Run
from fedsim.core.spec import Component, TrainSpec, Upload
from tests.staging import TINY, attack, observe, photos


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


@pytest.mark.parametrize(
    ("hoard", "words"),
    [
        ({"pictures": 4096}, "returned 4096 pictures, and at most 1 stand behind the update"),
        ({"labels": 8}, "returned 8 labels, and at most 1 stand behind the update"),
    ],
)
def test_more_guesses_than_pictures_are_a_failure(
    small_run: Run, tmp_path: Path, hoard: dict[str, int], words: str
) -> None:
    component = Component(name="tests.faults:Hoards", **hoard)
    job = Job(small_run.observations, tmp_path, *victims(small_run.spec)[0], component, "h", 0)
    with pytest.raises(AttackError, match=words):
        perform(job, Handout(small_run.spec.threat, 0, "cpu"), Secrets())


@pytest.mark.parametrize(
    "train",
    [
        TrainSpec(batch_size=2),
        TrainSpec(batch_size=2, upload=Upload.DELTA, local_steps=3),
        TrainSpec(batch_size=2, upload=Upload.DELTA, local_epochs=1),
    ],
)
@pytest.mark.parametrize("name", ["prior_only", "patch_solve", "inverting_gradients"])
def test_attacks_return_no_more_than_the_protocol_lets_one_assume(
    name: str, train: TrainSpec
) -> None:
    observation = observe(TINY, *photos(32, [70, 20]), train)
    params = {"steps": 2} if name == "inverting_gradients" else {}
    result = attack(observation, name, threat="C", **params)
    assert len(result.images) <= observation.pictures
    assert result.labels is None or len(result.labels) <= observation.pictures

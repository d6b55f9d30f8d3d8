"""Workers: jobs that are cut short, secrets that are granted, a pool that cannot write."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
import torch

from fedsim.audit.stages import audit
from fedsim.campaign.granted_truth import secrets_of
from fedsim.campaign.jobs import Handout, Job, perform
from fedsim.campaign.plan import jobs_of, victims
from fedsim.campaign.pools import Home, RayPool
from fedsim.core.errors import NotGranted, SpecError
from fedsim.core.knowledge import Secrets
from fedsim.core.run import Run
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


def test_the_truth_is_looked_up_only_where_the_threat_model_grants_it(small_run: Run) -> None:
    job = jobs_of(small_run, small_run.spec, victims(small_run.spec))[0]
    nothing = secrets_of(small_run.spec, small_run)(job)
    assert nothing == Secrets()
    spec = small_spec("threat={model: E, oracle_labels: true}")
    granted = secrets_of(spec, small_run)(job)
    assert granted.labels is not None
    assert granted.statistics is None  # a ViT has no BatchNorm layer


def test_batch_statistics_reach_the_attack_of_threat_e(tmp_path: Path) -> None:
    options = "{layers: [1, 1, 1, 1], channels: [8, 8, 8, 8], output_stride: 8}"
    overrides = [
        f"model={{name: resnet18, options: {options}}}",
        "train={rounds: 1, clients_per_round: 1, batch_size: 2, batchnorm: local, evaluate: false}",
        "attacks=[{name: grad_inversion, steps: 2, seeds: 1, batchnorm: exact}]",
    ]
    run = audit(small_spec(*overrides, "threat=E"), tmp_path / "granted")
    verdict = run.summary["verdicts"][0]
    assert "batch_statistics" in verdict["ledger"]
    run = audit(small_spec(*overrides, "threat=C"), tmp_path / "withheld")
    assert "batch_statistics" not in run.summary["verdicts"][0]["ledger"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("threat={model: C, prior: {name: efficientnet_lite0}}", "grants no prior network"),
        ("threat={model: C, withhold: [batchsize]}", "batch_size"),
    ],
)
def test_a_threat_section_that_contradicts_itself_is_refused(
    override: str, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=expected):
        audit(small_spec(override), tmp_path / "run")


@pytest.mark.parametrize("name", ["gradvit", "grad_inversion", "dlg", "row_space", "rgap"])
def test_an_attack_the_threat_model_does_not_carry_is_refused_before_any_round(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(NotGranted, match="architecture"):
        audit(small_spec("threat=A", f"attacks=[{{name: {name}}}]"), tmp_path / "run")
    assert not (tmp_path / "run" / "observations").exists()

"""Granted truth: looked up only where the threat model grants it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.audit.stages import audit
from fedsim.campaign.granted_truth import secrets_of
from fedsim.campaign.plan import jobs_of, victims
from fedsim.core.errors import ForeignObservationError
from fedsim.core.knowledge import Secrets
from fedsim.core.run import Run
from tests.conftest import small_spec


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


def test_a_job_on_an_observation_of_another_run_is_refused(small_run: Run) -> None:
    chosen = victims(small_run.spec)
    other = small_spec("train.batch_size=2")
    for attack in ("patch_solve", "joint"):  # which reads those of other clients as well
        spec = small_spec("train.batch_size=2", f"attacks=[{{name: {attack}}}]")
        job = jobs_of(small_run, spec, chosen)[0]
        assert secrets_of(small_run.spec, small_run)(job) == Secrets()
        with pytest.raises(ForeignObservationError, match="its batch_size is 1, not 2"):
            secrets_of(other, small_run)(job)

"""The real thing: Flower's simulation on Ray, and Ray attack workers beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import ray

from fedsim.audit.stages import audit
from fedsim.core.run import Run, list_observations
from tests.conftest import small_spec


@pytest.fixture(scope="module")
def ray_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two rounds on Ray, attacked by a Ray worker that is killed on its first job."""
    root = tmp_path_factory.mktemp("ray")
    attacks = [
        {"name": "tests.faults:KillsItsWorker", "marker": str(root / "killed")},
        {"name": "tests.faults:Crashes"},
        {"name": "tests.faults:Declines"},
        {"name": "patch_solve"},
    ]
    spec = small_spec(f"attacks={json.dumps(attacks)}", "engine={kind: ray, device: cpu}")
    run = audit(spec, root / "run")
    assert (root / "killed").exists()
    return run


def test_ray_and_inline_engines_give_the_same_results(ray_run: Run, small_run: Run) -> None:
    columns = ["round", "clients", "train_loss", "bytes"]
    pd.testing.assert_frame_equal(ray_run.rounds[columns], small_run.rounds[columns])
    for path in list_observations(small_run.observations):
        twin = ray_run.observations / path.relative_to(small_run.observations)
        own, other = (p.with_suffix(".safetensors").read_bytes() for p in (path, twin))
        assert own == other
    ours, theirs = (
        run.scores[run.scores["attack"] == "patch_solve"].reset_index(drop=True)
        for run in (ray_run, small_run)
    )
    shared = ["round", "client", "psnr", "ssim", "label_recovered", "canary"]
    pd.testing.assert_frame_equal(ours[shared], theirs[shared])


def test_a_killed_worker_is_retried_and_nothing_is_lost(ray_run: Run) -> None:
    verdicts = {v["attack"]: v for v in ray_run.summary["verdicts"]}
    assert verdicts["KillsItsWorker"]["images"] == 4
    assert verdicts["patch_solve"]["images"] == 4


def test_failures_arrive_with_their_reasons(ray_run: Run) -> None:
    kinds = {(job["attack"], job["kind"]) for job in ray_run.summary["failed_jobs"]}
    assert kinds == {("Crashes", "crashed"), ("Declines", "declined")}
    words = {v["attack"]: v["words"] for v in ray_run.summary["verdicts"]}
    assert "ZeroDivisionError: a bug in the attack" in words["Crashes"]
    assert "does not apply here" in words["Declines"]


@pytest.mark.slow
def test_resuming_on_ray_does_only_what_is_missing(ray_run: Run) -> None:
    results = sorted(ray_run.reconstructions.glob("patch_solve/*/*.safetensors"))
    kept = {path: path.stat().st_mtime_ns for path in results[1:]}
    before = ray_run.scores
    results[0].unlink()
    audit(ray_run.spec, ray_run.root)
    assert results[0].is_file()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    same = ["attack", "round", "client", "psnr"]
    pd.testing.assert_frame_equal(ray_run.scores[same], before[same])
    assert not ray.is_initialized()


def test_an_address_nobody_answers_is_one_sentence(tmp_path: Path) -> None:
    from fedsim.core.errors import RunError

    spec = small_spec("engine={kind: ray, address: '127.0.0.1:1'}")
    with pytest.raises(RunError, match=r"127\.0\.0\.1:1"):
        audit(spec, tmp_path / "run")

"""Parcels: a worker that does not see the driver's disk gets what it may read, and no more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch

from fedsim.campaign.jobs import Handout, Job, LessonJob, teach
from fedsim.campaign.plan import jobs_of, victims
from fedsim.campaign.pools import AttackWorker
from fedsim.campaign.remote_files import (
    Post,
    Returned,
    fetched,
    keep,
    pack,
    reads,
    sees,
    stamps,
    work_on,
)
from fedsim.core.attack import no_progress
from fedsim.core.knowledge import Secrets
from fedsim.core.run import Run
from fedsim.core.spec import Component
from tests.conftest import small_spec

ELSEWHERE = Path("/nowhere/on/this/node")


def moved(job: Job) -> Job:
    """The job as a node gets it on which none of its paths exist."""
    return replace(job, observations=ELSEWHERE / "observations", results=ELSEWHERE / "results")


def first_job(run: Run) -> Job:
    return jobs_of(run, run.spec, victims(run.spec))[0]


def test_a_worker_that_does_not_see_the_disk_gets_by_with_a_parcel(small_run: Run) -> None:
    job, handout = first_job(small_run), Handout(small_run.spec.threat, 1, "cpu")
    files = reads(job, handout)
    worker = AttackWorker(1)
    assert worker.sees(stamps(files))
    assert not worker.sees({ELSEWHERE / file.name: stamp for file, stamp in stamps(files).items()})
    here = worker.work(job, handout, Secrets()).result
    there = work_on(pack(files), moved(job), handout, Secrets(), no_progress).result
    assert torch.equal(here.images, there.images)  # type: ignore[union-attr]
    assert here.observation == there.observation  # type: ignore[union-attr]
    incomplete = {name: content for name, content in pack(files).items() if "weights" not in name}
    with pytest.raises(Exception, match="weights"):
        work_on(incomplete, moved(job), handout, Secrets(), no_progress)


def test_a_parcel_holds_one_observation_and_nothing_of_the_vault(small_run: Run) -> None:
    job = first_job(small_run)
    victim = f"observations/{job.victim}"
    weights = f"observations/{Path(job.victim).parent}/weights"
    assert set(reads(job, Handout(small_run.spec.threat, 1, "cpu"))) == {
        *(f"{victim}.json", f"{victim}.safetensors"),
        *(f"{weights}.json", f"{weights}.safetensors"),
    }


def test_a_file_of_the_same_name_is_not_taken_for_the_drivers(tmp_path: Path) -> None:
    file = tmp_path / "client-0000.json"
    file.write_text("ours")
    expected = stamps({"x": file})
    assert sees(expected)
    file.write_text("them")
    assert not sees(expected)


def test_what_a_learner_learned_elsewhere_comes_back(small_run: Run, tmp_path: Path) -> None:
    params = {"meta_steps": 1, "tasks": 1, "task_steps": 1}
    component = Component(name="giml", **params)
    handout = Handout(small_spec("threat=G").threat, 1, "cpu")

    def lesson(root: Path) -> LessonJob:
        return LessonJob(small_run.observations, root / "giml", component, "giml", 1, 1)

    teach(lesson(tmp_path / "here"), handout)
    job = lesson(tmp_path / "there")
    parcel = pack(reads(job, handout))
    away = replace(job, observations=ELSEWHERE, memory=ELSEWHERE / job.memory.name)
    returned = work_on(parcel, away, handout, Secrets(), no_progress)
    assert not job.memory.exists()
    keep(returned, job)
    kept = {file.name for file in job.memory.iterdir()}
    assert kept == {file.name for file in lesson(tmp_path / "here").memory.iterdir()}
    assert "state.safetensors" in kept


def test_what_is_sent_lies_in_the_store_once_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[bytes] = []
    monkeypatch.setattr(ray, "put", lambda content: put.append(content) or len(put) - 1)
    monkeypatch.setattr(ray, "get", lambda refs: [put[ref] for ref in refs])
    weights, first, second = (tmp_path / name for name in ("weights", "first", "second"))
    for file in (weights, first, second):
        file.write_bytes(file.name.encode() * 10)
    post = Post(room=140)  # two of the three

    def send(file: Path) -> dict[str, bytes]:
        return fetched(post.send({"weights": weights, "update": file}))

    assert send(first) == {"weights": b"weights" * 10, "update": b"first" * 10}
    assert send(second)["update"] == b"second" * 10
    assert len(put) == 3, "the weights are there already"
    send(first)
    assert len(put) == 4, "what was let go of is read again, the weights are not"
    weights.write_bytes(b"changed")
    assert send(first)["weights"] == b"changed"


def test_what_comes_back_cannot_be_written_outside_the_memory(tmp_path: Path) -> None:
    job = LessonJob(tmp_path, tmp_path / "memory", Component(name="giml"), "giml", 1, 1)
    stray = Returned(None, {"../stray": b""})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leads out"):
        keep(stray, job)
    assert not (tmp_path / "stray").exists()

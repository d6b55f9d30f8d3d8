"""A Ray cluster that is there already: two nodes on loopback, one of which dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import ray
import torch

import fedsim.cluster.session
from fedsim.audit.stages import audit
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
from fedsim.cluster import local
from fedsim.cluster.processes import Child, free_ports
from fedsim.cluster.session import ray_session
from fedsim.core.attack import Reconstruction, no_progress
from fedsim.core.errors import RunError, SpecError
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


def test_a_node_is_started_for_attacks_on_loopback_without_a_dashboard(tmp_path: Path) -> None:
    head = local.node_command(6399, head=True, cpus=2, attack=3, folder=tmp_path)
    assert {"--head", "--port=6399", "--include-dashboard=false", "--block"} <= set(head)
    assert {"--num-cpus=2", '--resources={"attack": 3}', f"--temp-dir={tmp_path}"} <= set(head)
    other = local.node_command(6399, head=False, cpus=0, attack=1)
    assert "--address=127.0.0.1:6399" in other
    assert not any(word.startswith(("--head", "--temp-dir", "--port")) for word in other)


def test_ending_a_cluster_leaves_a_process_alone_that_only_has_its_number(tmp_path: Path) -> None:
    state = tmp_path / "cluster.json"
    folder = tmp_path / "ray"
    folder.mkdir()
    node = {"pid": os.getpid(), "began": 1.0}  # were it believed, this test would end
    state.write_text(json.dumps({"address": "127.0.0.1:1", "folder": str(folder), "nodes": [node]}))
    assert local.stop(state) == 0
    assert not state.exists()
    assert not folder.exists()
    assert local.stop(state) == 0


def test_a_damaged_state_file_is_refused_by_name(tmp_path: Path) -> None:
    state = tmp_path / "cluster.json"
    state.write_text("{")
    with pytest.raises(RunError, match=r"cluster\.json' is damaged"):
        local.stop(state)
    assert state.exists()


def test_something_else_than_ray_at_the_address_is_one_sentence_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        began = time.monotonic()
        engine = small_spec(f"engine={{kind: ray, address: '{address}'}}").engine
        with pytest.raises(RunError, match="no Ray"), ray_session(engine):
            pass
        assert time.monotonic() - began < 10


def test_no_cluster_of_ours_is_one_sentence_before_anything_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fedsim.audit.stages.prepare", lambda spec: pytest.fail("it was prepared"))
    port = free_ports(1)[0]
    for address, words in (("auto", "fedsim cluster up"), (f"127.0.0.1:{port}", "refused")):
        spec = small_spec(f"engine={{kind: ray, address: '{address}'}}")
        with pytest.raises(RunError, match=words) as caught:
            audit(spec, tmp_path / "run")
        assert "\n" not in str(caught.value)


def test_an_address_without_a_port_is_refused() -> None:
    engine = small_spec("engine={kind: ray, address: somewhere}").engine
    with pytest.raises(RunError, match="host:port"), ray_session(engine):
        pass


@pytest.mark.parametrize("wrong", ["-1", "1.5", ".inf"])
def test_shares_of_a_gpu_that_ray_cannot_give_are_refused(wrong: str) -> None:
    with pytest.raises(SpecError, match="gpus_per_worker"):
        small_spec(f"engine={{kind: ray, gpus_per_worker: {wrong}}}")


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


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two nodes with room for one attack worker each."""
    file = tmp_path_factory.mktemp("cluster") / "state.json"
    local.start(file, nodes=2, cpus=1, attack=1)
    yield file
    local.stop(file)


def engine_at(state: Path, workers: int = 2, **more: object) -> str:
    cluster = local.read(state)
    assert cluster is not None
    told = {"kind": "ray", "device": "cpu", "address": cluster.address, "attack_workers": workers}
    return f"engine={json.dumps(told | more)}"


SHARED = ["round", "client", "attack", "psnr", "ssim", "label_recovered", "canary"]


@pytest.mark.slow
def test_the_same_spec_on_a_cluster_gives_the_same_scores_twice(
    state: Path, small_run: Run, tmp_path: Path
) -> None:
    for name in ("cold", "warm"):  # the end of a run only disconnects
        run = audit(small_spec(engine_at(state)), tmp_path / name)
        pd.testing.assert_frame_equal(run.scores[SHARED], small_run.scores[SHARED])
    assert not ray.is_initialized()


@pytest.mark.slow
def test_a_cluster_of_another_version_is_refused_with_both_named(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fedsim.cluster.session.own_version()
    monkeypatch.setattr(fedsim.cluster.session, "own_version", lambda: "99.0")
    engine = small_spec(engine_at(state)).engine
    with (
        pytest.raises(RunError, match=rf"fedsim {real} and this process 99\.0"),
        ray_session(engine),
    ):
        pass
    assert not ray.is_initialized()


@pytest.mark.slow
def test_more_gpu_than_there_is_is_refused(state: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="Ray offers 0 GPUs"):
        audit(small_spec(engine_at(state, gpus_per_worker=0.5)), tmp_path / "run")


@pytest.mark.slow
def test_a_node_that_dies_mid_attack_loses_nothing_and_one_added_later_is_used(
    state: Path, small_run: Run, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    slow = {"name": "tests.faults:SaysWhere", "nodes": 3, "marker": str(begun)}
    attacks = f"attacks={json.dumps([slow, {'name': 'patch_solve'}])}"
    cluster = local.read(state)
    assert cluster is not None
    helper = threading.Thread(target=_replace_a_node, args=(state, cluster.nodes[1], begun))
    helper.start()
    # A node that is lost is no try of the job.
    run = audit(small_spec(engine_at(state, retries=0), attacks), tmp_path / "run")
    helper.join()
    assert not run.summary["failed_jobs"]
    jobs = [job for job in jobs_of(run, run.spec, victims(run.spec)) if job.label == "SaysWhere"]
    nodes = begun.read_text().split()
    assert len(nodes) == len(jobs) + 1, "only what was cut short was done again"
    assert len(set(nodes)) == 3, "both nodes worked, and later the one that was added"
    expected = small_run.scores
    ours = run.scores[run.scores["attack"].isin(expected["attack"])].reset_index(drop=True)
    pd.testing.assert_frame_equal(ours[SHARED], expected[SHARED])


def _replace_a_node(state: Path, node: Child, begun: Path) -> None:
    """Kill a node when both are at work, and start another."""
    while not begun.exists() or len(set(begun.read_text().split())) < 2:
        time.sleep(0.1)
    os.killpg(node.pid, signal.SIGKILL)
    local.add(state, cpus=1, attack=1)


def hiding(folder: Path, command: list[str]) -> list[str]:
    """A command in a mount namespace of its own, in which a folder is empty."""
    script = 'mount -t tmpfs none "$0" && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, str(folder), *command]


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]).returncode != 0
    if shutil.which("unshare")
    else True,
    reason="mount namespaces take root",
)
def test_workers_without_the_drivers_disk_do_the_same(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacks = [{"name": "patch_solve"}, {"name": "tests.faults:SaysWhere"}]
    ours = tmp_path / "disk"
    ours.mkdir()
    state = tmp_path / "state.json"
    plain = local.node_command
    try:
        local.start(state, cpus=1, attack=0)
        with pytest.raises(RunError, match="offers no 'attack' resource"):
            audit(small_spec(engine_at(state)), tmp_path / "nobody")
        monkeypatch.setattr(
            local, "node_command", lambda *args, **kw: hiding(ours, plain(*args, **kw))
        )
        blind = local.add(state, cpus=1, attack=1).nodes[-1]
        with pytest.raises(RunError, match="does not see"):
            audit(small_spec(engine_at(state)), ours / "blind")
        os.killpg(blind.pid, signal.SIGKILL)
        local.add(state, cpus=0, attack=2)
        run = audit(small_spec(engine_at(state), f"attacks={json.dumps(attacks)}"), ours / "run")
    finally:
        local.stop(state)
    expected = small_run.scores
    same = run.scores[run.scores["attack"].isin(expected["attack"])].reset_index(drop=True)
    pd.testing.assert_frame_equal(same[SHARED], expected[SHARED])
    for job in jobs_of(run, run.spec, victims(run.spec)):
        if job.label == "SaysWhere":
            notes = Reconstruction.load(job.result).notes
            assert any("fedsim-job-" in note for note in notes)
            assert not any(str(ours) in note for note in notes)

"""A Ray cluster that is there already: two nodes on loopback, one of which dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest
import ray
from ray._common.utils import get_ray_address_file

import fedsim.cluster.session
from fedsim.audit.stages import audit
from fedsim.campaign.plan import jobs_of, victims
from fedsim.cluster import local
from fedsim.cluster.processes import Child, began
from fedsim.cluster.session import ray_session
from fedsim.core.attack import Reconstruction
from fedsim.core.errors import RunError
from fedsim.core.files import write_json
from fedsim.core.run import Run
from tests.conftest import small_spec


def test_a_node_is_started_for_attacks_on_loopback_without_a_dashboard(tmp_path: Path) -> None:
    head = local.node_command(6399, head=True, cpus=2, attack=3, folder=tmp_path)
    assert {"--head", "--port=6399", "--include-dashboard=false", "--block"} <= set(head)
    assert {"--num-cpus=2", '--resources={"attack": 3}', f"--temp-dir={tmp_path}"} <= set(head)
    other = local.node_command(6399, head=False, cpus=0, attack=1)
    assert "--address=127.0.0.1:6399" in other
    assert not any(word.startswith(("--head", "--temp-dir", "--port")) for word in other)


def test_ending_a_cluster_leaves_a_process_alone_that_only_has_its_number(tmp_path: Path) -> None:
    state = tmp_path / "cluster.json"
    folder = local.folders.make()
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


@pytest.mark.parametrize("name", ["thesis", "fedsim-ray-thesis"])
def test_ending_a_cluster_leaves_a_folder_alone_that_is_none_of_ours(
    name: str, tmp_path: Path
) -> None:
    state, thesis = tmp_path / "cluster.json", tmp_path / name
    thesis.mkdir()
    (thesis / "chapter.tex").write_text("years of work")
    (thesis / "owner.json").write_text("{}")
    write_json(state, asdict(local.Cluster("127.0.0.1:1", str(thesis), ())))
    with pytest.raises(RunError, match=r"is no folder of a cluster of yours here: it is left"):
        local.stop(state)
    assert (thesis / "chapter.tex").read_text() == "years of work"
    assert not state.exists()


def test_a_folder_that_went_with_its_cluster_is_not_missed(tmp_path: Path) -> None:
    state = tmp_path / "cluster.json"
    write_json(state, asdict(local.Cluster("127.0.0.1:1", str(tmp_path / "gone"), ())))
    assert local.stop(state) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"address": "somewhere"},
        {"address": "10.0.0.1:6379"},
        {"address": "127.0.0.1:99999"},
        {"address": "127.0.0.1:../../notes"},
        {"folder": "a\0b"},
        *({"nodes": [{"pid": pid, "began": 1.0}]} for pid in (0, 1, -1, True, 2.5, 2**40, None)),
    ],
)
def test_a_state_file_that_no_cluster_wrote_is_refused(
    other: dict[str, object], tmp_path: Path
) -> None:
    state = tmp_path / "cluster.json"
    write_json(state, asdict(local.Cluster("127.0.0.1:1", "/nowhere", ())) | other)
    with pytest.raises(RunError, match=r"cluster\.json' is damaged; look for"):
        local.read(state)


def test_a_state_file_that_was_altered_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "cluster.json"
    write_json(state, asdict(local.Cluster("127.0.0.1:1", "/nowhere", ())))
    state.write_text(state.read_text().replace("/nowhere", "/somewhere"))
    with pytest.raises(RunError, match=r"cluster\.json' is damaged"):
        local.stop(state)


def test_a_start_that_fails_leaves_nothing_neither_its_own_nor_a_dead_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local.folders, "place", lambda: tmp_path / "place")
    monkeypatch.setattr(local, "_spawn", lambda command, log: pytest.fail("no process"))
    (tmp_path / "place").mkdir()
    left = local.folders.make()
    file = tmp_path / "cluster.json"
    dead = local.Cluster("127.0.0.1:1", str(left), (Child(os.getpid(), 1.0),))
    write_json(file, asdict(dead))
    with pytest.raises(pytest.fail.Exception):
        local.start(file)
    assert not list((tmp_path / "place").iterdir())
    assert not file.exists()


def test_a_cluster_is_ours_while_its_head_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    elsewhere = tmp_path / "state.json"
    own, gone = Child(os.getpid(), began(os.getpid())), Child(os.getpid(), 1.0)
    address = "127.0.0.1:6399"
    note = local._note(local.Cluster(address, "/nowhere", ()))
    for head, ours in ((own, True), (gone, False)):
        write_json(elsewhere, asdict(local.Cluster(address, "/nowhere", (head,))))
        assert not local.started_here(address), "nobody noted where its state is"
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(str(elsewhere))
        assert local.started_here(address) is ours
        assert not local.started_here("127.0.0.1:6398")
        note.unlink()
    write_json(local.state_file(), asdict(local.Cluster(address, "/nowhere", (own,))))
    assert local.started_here(address)
    assert local.started_here("localhost:6399")


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


@pytest.mark.slow
def test_a_cluster_that_was_killed_leaves_no_record_and_its_folder_goes(tmp_path: Path) -> None:
    file, usual = tmp_path / "state.json", Path(get_ray_address_file(None))
    try:
        first = local.start(file, cpus=1)
        assert local.started_here(first.address)
        os.killpg(first.nodes[0].pid, signal.SIGKILL)
        end = time.monotonic() + 20
        while local.running(first) and time.monotonic() < end:
            time.sleep(0.1)
        assert not local.started_here(first.address)
        assert not usual.is_file() or usual.read_text() != first.address
        second = local.start(file, cpus=1)
        assert not Path(first.folder).exists()
    finally:
        local.stop(file)
    assert not Path(second.folder).exists()
    assert not local.started_here(second.address)
    noted = {local._note(cluster).name for cluster in (first, second)}
    assert noted.isdisjoint(file.name for file in local._notes().glob("*"))


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
        with monkeypatch.context() as patch:
            patch.setattr("fedsim.cluster.session.JOINING_SECONDS", 2.0)
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

"""A run: what its directory gives back, and what it refuses."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedsim.campaign.plan import victims
from fedsim.core.errors import DamagedError, RunError
from fedsim.core.files import write_json
from fedsim.core.run import Run
from fedsim.core.spec import Spec, load_spec
from tests.planted import flip


def test_images_are_what_the_attack_returned(small_run: Run) -> None:
    round_, client = victims(small_run.spec)[0]
    images = small_run.images("patch_solve", round_, client)
    assert tuple(images.shape) == (1, 3, 32, 32)
    assert 0 <= float(images.min()) <= float(images.max()) <= 1
    with pytest.raises(RunError, match="no reconstruction by nobody"):
        small_run.images("nobody", round_, client)


def test_a_notebook_shows_the_verdicts(small_run: Run, tmp_path: Path) -> None:
    page = small_run._repr_html_()
    assert "<b>LEAKS</b>" in page
    assert str(small_run.report) in page
    assert "not finished" in Run(tmp_path)._repr_html_()
    assert repr(small_run) == f"Run('{small_run.root}')"


def test_a_run_from_before_a_path_was_made_absolute_still_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {"threat": {"model": "D", "prior": {"checkpoint": "prior.pth"}}}
    before = Spec.model_validate(content)
    run = Run.create(tmp_path / "run", before)
    assert load_spec(content).digest() != before.digest()
    assert Run.open(run.root).spec == load_spec(content)
    Run.create(run.root, load_spec(content))  # the same one again
    with pytest.raises(RunError, match="holds a run of another spec"):
        Run.create(run.root, load_spec(content, ["seed=1"]))
    (run.root / "spec.yaml").write_text("seed: 1")
    assert Run.open(run.root).spec == load_spec(content)  # the record has it, too


def test_a_spec_from_before_that_is_not_the_one_of_the_beginning_is_refused(
    tmp_path: Path,
) -> None:
    write_json(tmp_path / "run.json", {"digest": Spec().digest(), "deployed": False})
    (tmp_path / "spec.yaml").write_text(Spec().to_yaml())
    assert Run.open(tmp_path).spec == Spec()
    (tmp_path / "spec.yaml").write_text("seed: 1")
    with pytest.raises(RunError, match="not the one that the run began with"):
        Run.open(tmp_path)


def test_events_are_sealed_line_by_line_and_the_lost_are_counted(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for number in range(4):
        run.note("test", f"event {number}", round=number)
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"event 1", b"event 7")
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines))
    kept, lost = run.events()[:-1], run.events()[-1]
    assert [event["message"] for event in kept] == ["event 0", "event 2", "event 3"]
    assert lost["message"] == "lines of events.jsonl were damaged and are lost: 1"
    assert all("seal" not in event for event in kept)


def test_events_from_before_are_read_and_kept(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind": "a", "message": "b"}\n')
    run = Run(tmp_path)
    run.note("c", "d")
    run.note("c", "d")
    assert run.events() == [{"kind": "a", "message": "b"}, {"kind": "c", "message": "d"}]


def test_events_noted_at_once_are_all_kept(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: run.note("test", f"event {number}"), range(24)))
    assert len(run.events()) == 24


@pytest.mark.parametrize("lead", ["link", "second name"])
def test_a_lock_that_leads_to_a_file_of_the_readers_leaves_it_alone(
    lead: str, tmp_path: Path
) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("years of work\n")
    run = Run.create(tmp_path / "run", Spec())
    lock = run.root / "run.lock"
    if lead == "link":
        lock.symlink_to(precious)
    else:
        lock.hardlink_to(precious)
    with pytest.raises(RunError, match=r"is (a link|not a lock).*delete it"), run.locked():
        pass
    assert precious.read_text() == "years of work\n"
    lock.unlink()
    with run.locked():
        assert lock.read_text() == f"{os.getpid()}\n"


def test_a_link_to_nothing_makes_no_file_where_it_leads(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", Spec())
    (run.root / "run.lock").symlink_to(tmp_path / "new")
    with pytest.raises(RunError, match="is a link"), run.locked():
        pass
    assert not (tmp_path / "new").exists()


def test_a_pipe_in_the_place_of_the_lock_is_one_sentence(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", Spec())
    os.mkfifo(run.root / "run.lock")
    with pytest.raises(RunError, match="is not a lock"), run.locked():
        pass


def test_a_lock_with_a_second_name_of_its_own_is_taken(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", Spec())
    with run.locked():
        pass
    (tmp_path / "backup").hardlink_to(run.root / "run.lock")
    with run.locked():
        assert (tmp_path / "backup").read_text() == f"{os.getpid()}\n"


def test_a_run_directory_may_be_a_link_itself(small_run: Run, tmp_path: Path) -> None:
    shutil.copytree(small_run.root, tmp_path / "run")
    (tmp_path / "linked").symlink_to(tmp_path / "run")
    run = Run.open(tmp_path / "linked")
    with run.locked():
        assert len(run.scores) == len(small_run.scores)
        assert run.summary == small_run.summary


@pytest.mark.parametrize("name", ["run.json", "spec.yaml", "events.jsonl", "scores.csv"])
@pytest.mark.parametrize("kind", ["device", "pipe", "link"])
def test_what_is_no_file_is_never_waited_for_nor_read_without_end(
    name: str, kind: str, small_run: Run, tmp_path: Path
) -> None:
    shutil.copytree(small_run.root, tmp_path / "run")
    path = tmp_path / "run" / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else small_run.root / name)
    run = Run.open(tmp_path / "run")  # of its record there are two
    assert run.spec == small_run.spec
    if name == "events.jsonl":
        assert [event["kind"] for event in run.events()] == ["events_lost"]
    if name == "scores.csv":
        with pytest.raises(RunError if kind != "link" else DamagedError, match=r"scores\.csv"):
            run.scores.any()


def test_a_damaged_summary_is_one_sentence(small_run: Run, tmp_path: Path) -> None:
    run = Run(shutil.copytree(small_run.root, tmp_path / "run"))
    flip(run.summary_path, 200, 0)
    with pytest.raises(DamagedError, match=r"summary.json' is damaged; run `fedsim audit --resume"):
        assert run.summary


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "client_failed", "message": "x", "round": [1], "client": {}}',
        '{"kind": "client_failed", "message": "x", "round": "1", "client": true}',
        '{"kind": "client_failed", "message": "x", "of": {"a": 1}}',
        '{"kind": 1, "message": "x"}',
        '["kind", "message"]',
    ],
)
def test_an_event_of_odd_types_is_damage(tmp_path: Path, line: str) -> None:
    (tmp_path / "events.jsonl").write_text(f'{{"kind": "a", "message": "b"}}\n{line}\n')
    kept, lost = Run(tmp_path).events()
    assert (kept["kind"], lost["kind"]) == ("a", "events_lost")


def test_a_summary_is_believed_beside_the_scores_it_was_made_of(
    small_run: Run, tmp_path: Path
) -> None:
    assert small_run.is_concluded(small_run.spec)
    assert not small_run.is_concluded(small_run.spec.model_copy(update={"seed": 2}))
    run = Run(tmp_path)
    for name in ("summary.json", "scores.csv"):
        (tmp_path / name).write_bytes((small_run.root / name).read_bytes())
    assert run.is_concluded(small_run.spec)
    (tmp_path / "scores.csv").write_bytes(run.scores.assign(psnr=1.0).to_csv().encode())
    assert not run.is_concluded(small_run.spec)
    for text in ("{}", "[]", "nonsense"):
        (tmp_path / "summary.json").write_text(text)
        assert not run.is_concluded(small_run.spec)
        with pytest.raises(DamagedError, match="is damaged"):
            _ = run.summary


def test_a_lock_is_not_left_to_a_child_that_was_forked_meanwhile(tmp_path: Path) -> None:
    """As a data loader's workers are that outlive a capture."""
    run = Run(tmp_path / "run")
    with run.locked():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
    try:
        with run.locked():
            assert child.is_alive()
    finally:
        child.kill()
        child.join()

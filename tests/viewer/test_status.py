"""How runs stand: planned, at work, stopped, finished, damaged."""

from __future__ import annotations

import shutil
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from fedsim.core.files import read_json, write_json
from fedsim.core.run import Run
from fedsim.viewer.app import create_app
from fedsim.viewer.status import QUIET_SECONDS
from tests.conftest import small_spec
from tests.strangers import announce, invite, shared_run
from tests.viewing import TOKEN, comparison, look, planned, stands, text, unfinished


def test_a_spec_alone_is_a_planned_run(shelf: Path) -> None:
    run = stands(planned(shelf))
    assert run.state == "planned"
    assert run.words == "2 rounds and 8 attack jobs to do"


def test_a_run_at_work_says_how_far_it_got(shelf: Path) -> None:
    run = stands(unfinished(shelf))
    assert run.state == "running"
    assert (run.rounds_done, run.rounds_total) == (1, 2)
    assert (run.jobs_done, run.jobs_failed, run.jobs_total) == (2, 1, 8)
    assert run.words == "1 of 2 rounds, 2 of 8 jobs, 1 failed"
    app = create_app([shelf / "half"], TOKEN)
    page = text(look(app, f"/runs/{run.place.key}"))
    assert "patch_solve 2 of 4 jobs, 1 failed" in page
    assert "prior_only 0 of 4 jobs" in page
    assert "a job: no memory" in page


def test_a_run_that_writes_nothing_for_long_is_told_as_stopped(shelf: Path) -> None:
    root = unfinished(shelf)
    changed = stands(root).changed
    assert changed is not None
    assert stands(root, now=changed + QUIET_SECONDS - 1).state == "running"
    stopped = stands(root, now=changed + QUIET_SECONDS + 60)
    assert stopped.state == "stopped"
    assert stopped.ago == "changed 6 min ago"


def test_results_of_other_attacks_and_half_written_files_do_not_count(shelf: Path) -> None:
    root = unfinished(shelf)
    before = stands(root)
    folder = root / "reconstructions" / "patch_solve" / "round-0001"
    (folder / ".client-0000-trial-0.safetensors.abc").write_text("half")
    (folder / "client-0099-trial-0.safetensors").write_text("of nobody")
    (root / "reconstructions" / "gone" / "round-0001").mkdir(parents=True)
    (root / "reconstructions" / "gone" / "round-0001" / "client-0000-trial-0.safetensors").touch()
    after = stands(root)
    assert (after.jobs_done, after.jobs_total) == (before.jobs_done, before.jobs_total)


def test_rounds_without_attacks_are_trained(shelf: Path) -> None:
    root = unfinished(shelf)
    shutil.copy(shelf / "done" / "rounds.csv", root / "rounds.csv")
    shutil.rmtree(root / "reconstructions")
    assert stands(root, now=time.time() + 3600).state == "trained"


def test_a_finished_run_shows_its_verdicts(shelf: Path, small_run: Run) -> None:
    run = stands(shelf)
    assert run.state == "finished"
    told = {entry["attack"]: entry["verdict"] for entry in small_run.summary["verdicts"]}
    assert [(o.attack, o.verdict) for o in run.verdicts] == [("patch_solve", told["patch_solve"])]
    app = create_app([shelf], TOKEN)
    assert f"{told['patch_solve']} patch_solve" in text(look(app, "/"))
    (fact,) = look(app, "/api/runs").json()["runs"]
    assert fact["verdicts"] == [{"attack": "patch_solve", "verdict": told["patch_solve"]}]
    assert fact["jobs"] == {"done": 8, "failed": 0, "total": 8}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("spec.yaml", b""),
        ("spec.yaml", b"train: {rounds: -3}"),
        ("spec.yaml", b"train: {rounds: 999999999999}"),
        ("spec.yaml", b"\xff\xfe\x00"),
        ("summary.json", b'{"verdicts": [{"atta'),
        ("summary.json", b'{"verdicts": "LEAKS"}'),
        ("summary.json", b'{"verdicts": [{"attack": "a", "verdict": "LEAKS", "metrics": 3}]}'),
        ("summary.json", b"[]"),
        ("summary.json", b"[" * 100_000),
    ],
)
def test_a_damaged_run_is_told_in_one_line_and_others_are_shown(
    shelf: Path, name: str, content: bytes
) -> None:
    shutil.copytree(shelf / "done", shelf / "bad")
    (shelf / "bad" / name).write_bytes(content)
    app = create_app([shelf], TOKEN)
    runs = {run["name"]: run for run in look(app, "/api/runs").json()["runs"]}
    assert runs["bad"]["state"] == "damaged"
    assert name in runs["bad"]["words"]
    assert "\n" not in runs["bad"]["words"]
    assert runs["done"]["state"] == "finished"
    for path in ("/", f"/runs/{runs['bad']['key']}", comparison(app, "bad", "done")):
        page = look(app, path)
        assert page.status_code == 200
        assert name in text(page)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rounds.csv", b""),
        ("rounds.csv", b"round,cli"),
        ("rounds.csv", b'"\x00'),
        ("rounds.csv", b"nothing\nhere\n"),
        ("events.jsonl", b'{"kind": "a", "message"'),
        ("events.jsonl", b"3\n[]\n"),
    ],
)
def test_a_half_written_table_or_event_does_not_break_a_run_at_work(
    shelf: Path, name: str, content: bytes
) -> None:
    root = unfinished(shelf)
    (root / name).write_bytes(content)
    run = stands(root)
    assert run.state == "running"
    page = look(create_app([root], TOKEN), f"/runs/{run.place.key}")
    assert page.status_code == 200
    assert name in text(page) or content == b"round,cli"


def test_a_baseline_is_known_by_what_the_summary_says(shelf: Path) -> None:
    path = shelf / "done" / "summary.json"
    summary = read_json(path)
    assert summary["baseline"] == "prior_only"
    write_json(path, {**summary, "baseline": "patch_solve"})
    assert [outcome.attack for outcome in stands(shelf).verdicts] == ["prior_only"]
    del summary["baseline"]  # as older versions wrote it
    write_json(path, summary)
    assert [outcome.attack for outcome in stands(shelf).verdicts] == ["patch_solve"]


def pages_of(shelf: Path) -> list[httpx.Response]:
    app = create_app([shelf], TOKEN)
    keys = [run["key"] for run in look(app, "/api/runs").json()["runs"]]
    paths = ["/", *(f"/runs/{key}{part}" for key in keys for part in ("", "/live"))]
    paths += [f"/compare?run={a}&run={b}" for a, b in pairwise(keys)]
    return [look(app, path) for path in paths]


@pytest.mark.parametrize("line", ["a{0}: &a{0} [{1}]", "a{0}: &a{0} {{k: [{1}]}}"])
def test_a_spec_of_aliases_within_aliases_is_damaged_and_takes_no_room(
    shelf: Path, line: str
) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 10):
        lines.append(line.format(level, ", ".join([f"*a{level - 1}"] * 9)))
    (shelf / "new").mkdir()
    (shelf / "new" / "spec.yaml").write_text("\n".join([*lines, "model: {options: {x: *a9}}"]))
    tracemalloc.start()
    answers = pages_of(shelf)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(answer.status_code == 200 for answer in answers)
    assert "its aliases written out" in text(answers[0])
    assert most < 64 << 20


def test_a_spec_of_a_thousand_attacks_is_not_counted_out(shelf: Path) -> None:
    attacks = ", ".join(f"{{name: dlg, title: a{n}}}" for n in range(1000))
    spec = f"data: {{clients: 1000}}\ntrain: {{rounds: 1000}}\nattacks: [{attacks}]"
    (shelf / "new").mkdir()
    (shelf / "new" / "spec.yaml").write_text(spec)
    assert "more jobs than can be counted" in text(pages_of(shelf)[0])


def test_what_a_suite_did_not_need_is_not_failed(shelf: Path) -> None:
    root = Run.create(shelf / "suite", small_spec("attacks=standard")).root
    folder = root / "reconstructions" / "layers" / "round-0001"
    folder.mkdir(parents=True)
    spec = Run.open(root).spec
    client = spec.cohort(1)[0]
    failure = folder / f"client-{client:04d}-trial-0.failed.json"
    write_json(failure, {"job": "a job", "kind": "spared", "reason": "not needed"})
    run = stands(root)
    assert (run.jobs_done, run.jobs_failed) == (1, 0)
    by_name = {attack.attack: attack for attack in run.attacks}
    assert by_name["four times the steps"].total == 1
    assert by_name["layers"].total == 4


@pytest.mark.parametrize("beside", ["patch_solve", "standard"])
def test_no_page_imports_what_a_spec_names(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    stranger = invite(tmp_path / "modules", monkeypatch)
    naming = [
        f"attacks=[{{name: 'stranger:call'}}, {{name: {beside}}}]",
        "defenses=[{name: 'stranger:Defended'}]",
        "data.name='stranger:call'",
        "threat={model: D, surrogate: {name: 'stranger:call'}, prior: {checkpoint: x}}",
    ]
    shelf = tmp_path / "runs"
    done = shared_run(small_run, shelf / "done", small_spec(*naming))
    announce(done, "stranger:Defended")
    half = shared_run(small_run, shelf / "half", small_spec(*naming))
    half.summary_path.unlink()
    answers = pages_of(shelf)
    assert [answer.status_code for answer in answers] == [200] * 6
    assert any("stranger:call" in answer.text for answer in answers)  # shown, as words
    assert not stranger.ran

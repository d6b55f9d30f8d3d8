"""The viewer: how runs stand, what lies side by side, and what a browser makes of it."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedsim.audit.stages import audit
from fedsim.core.errors import RunError, SpecError
from fedsim.core.run import Run
from fedsim.viewer.app import create_app
from fedsim.viewer.charts import Series, curves
from fedsim.viewer.files import Files
from fedsim.viewer.run_index import Shelf, short_names
from fedsim.viewer.server import listen, serve
from fedsim.viewer.status import QUIET_SECONDS, standing
from tests.conftest import small_spec
from tests.viewing import (
    ROOT,
    TOKEN,
    comparison,
    key_of,
    look,
    planned,
    shelf,
    stands,
    text,
    unfinished,
)

__all__ = ["shelf"]

# How runs stand.


def test_runs_are_found_in_folders_and_benches_but_not_in_runs(shelf: Path) -> None:
    bench = shelf / "grid"
    for cell in ("cells/none", "utility/none", "cells/clip"):
        (bench / cell).mkdir(parents=True)
        shutil.copy(shelf / "done" / "spec.yaml", bench / cell / "spec.yaml")
    (bench / "bench.json").write_text("{}")
    (bench / "report.html").write_text("<p>the frontier</p>")
    (shelf / "done" / "vault" / "spec.yaml").write_text("{}")
    groups = Shelf([shelf, shelf / "done"]).groups()
    found = {g.name: [run.name for run in g.runs] for g in groups}
    assert found == {"grid": ["clip", "cells/none", "utility/none"], "runs": ["done"]}
    app, keys = create_app([shelf], TOKEN), {g.name: g.key for g in groups}
    assert "the frontier" in look(app, f"/benches/{keys['grid']}/report").text
    assert f"/benches/{keys['grid']}/report" in look(app, "/").text
    assert look(app, f"/benches/{keys['runs']}/report").status_code == 404


def test_names_are_as_short_as_they_can_be() -> None:
    paths = [Path("/a/x/run"), Path("/a/y/run"), Path("/a/other")]
    assert list(short_names(paths).values()) == ["x/run", "y/run", "other"]


def test_a_folder_without_a_run_waits_for_one(tmp_path: Path) -> None:
    page = text(look(create_app([tmp_path], TOKEN), "/"))
    assert "No run yet" in page
    with pytest.raises(RunError, match="no directory"):
        create_app([tmp_path / "missing"], TOKEN)


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


def test_a_file_that_changes_is_read_again(shelf: Path) -> None:
    root, files = unfinished(shelf), Files()
    place = Shelf([root]).runs()[0]
    assert standing(files, place).rounds_done == 1
    shutil.copy(shelf / "done" / "rounds.csv", root / "rounds.csv")
    assert standing(files, place).rounds_done == 2


# Side by side.


@pytest.fixture(scope="module")
def two(small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run, and the same with noise."""
    folder = tmp_path_factory.mktemp("two") / "runs"
    shutil.copytree(small_run.root, folder / "plain")
    noise = "defenses=[{name: gaussian_noise, std: 0.01, relative: true}]"
    audit(small_spec(noise), folder / "noisy")
    audit(small_spec("seed=5"), folder / "seeded")
    return folder


def test_two_runs_lie_side_by_side(two: Path) -> None:
    app = create_app([two], TOKEN)
    page = look(app, comparison(app, "plain", "noisy"))
    shown = text(page)
    assert "defenses none gaussian_noise (std 0.01, relative true)" in shown
    assert "seed" not in shown  # the same in both
    for name in ("plain", "noisy"):
        (entry,) = [e for e in Run(two / name).summary["verdicts"] if e["attack"] == "patch_solve"]
        psnr = entry["metrics"]["psnr"]
        assert f"{psnr['mean']:.1f} [{psnr['low']:.1f}, {psnr['high']:.1f}]" in shown
        assert entry["verdict"] in shown
    assert "pictures that both runs attacked" in shown
    figures = page.text.count('class="victim ')
    assert page.text.count("<img ") == 3 * figures > 0
    assert page.text.count('alt="Original picture') == figures
    assert page.text.count('alt="noisy: Reconstruction by patch_solve') == figures
    assert "Training loss over the rounds: plain from" in page.text


def test_the_same_client_of_another_seed_is_another_picture(two: Path) -> None:
    app = create_app([two], TOKEN)
    page = look(app, comparison(app, "plain", "seeded"))
    assert "did not attack the same pictures" in text(page)
    assert "pictures that both runs attacked" not in text(page)
    assert page.text.count('class="pair"') == 8


def test_an_unfinished_run_lies_beside_a_finished_one(shelf: Path) -> None:
    unfinished(shelf)
    app = create_app([shelf], TOKEN)
    shown = text(look(app, comparison(app, "done", "half")))
    assert "the specs are the same" in shown
    assert "no result yet" in shown
    assert "1 of 2 rounds" in shown


def test_damaged_pictures_leave_the_rest_of_a_comparison(shelf: Path) -> None:
    shutil.copytree(shelf / "done", shelf / "bad")
    for path in (shelf / "bad" / "reconstructions").glob("*/*/*.safetensors"):
        path.write_bytes(b"nothing")
    app = create_app([shelf], TOKEN)
    page = look(app, comparison(app, "bad", "done"))
    assert page.status_code == 200
    assert "Its pictures cannot be shown" in text(page)
    assert page.text.count('class="pair"') == 4  # those of the other


def test_a_comparison_asks_for_two_to_four_runs_that_are_here(two: Path) -> None:
    app = create_app([two], TOKEN)
    assert look(app, comparison(app, "plain")).status_code == 400
    assert look(app, comparison(app, "plain", "plain")).status_code == 400
    assert look(app, "/compare").status_code == 400
    assert look(app, comparison(app, "plain") + "&run=unknown").status_code == 404


def test_names_from_a_run_are_text_not_markup(shelf: Path) -> None:
    crooked = shelf / '<img src=x onerror="alert(1)">'
    shutil.copytree(shelf / "done", crooked)
    root = unfinished(shelf, "<b>half</b>")
    (root / "events.jsonl").write_text(json.dumps({"kind": "<i>", "message": "<script>"}) + "\n")
    app = create_app([shelf], TOKEN)
    keys = [run["key"] for run in look(app, "/api/runs").json()["runs"]]
    paths = ["/", f"/compare?run={keys[0]}&run={keys[1]}", *(f"/runs/{key}" for key in keys)]
    for page in (look(app, path).text for path in paths):
        assert "<img src=x" not in page
        assert "<b>half" not in page
        assert "<script>" not in page


def test_a_chart_of_one_round_or_none_is_drawn_or_left_out() -> None:
    assert curves([Series(1, "a", [])], "Loss") is None
    one = curves([Series(1, "a", [(1.0, 2.0)]), Series(2, "b", [(1.0, 0.0)])], "Loss")
    assert one is not None
    assert "nan" not in one
    assert one.count('class="curve') == 2


def test_the_style_uses_only_colours_that_it_has() -> None:
    own = (ROOT / "fedsim/viewer/pages/view.css").read_text()
    known = own + (ROOT / "fedsim/report/style.css").read_text()
    defined = set(re.findall(r"(--[\w-]+):", known))
    assert set(re.findall(r"var\((--[\w-]+)\)", own)) <= defined


# On a real socket.


def test_other_addresses_than_loopback_are_refused(shelf: Path) -> None:
    for host in ("0.0.0.0", "::", "192.168.0.7", "example.org"):
        with pytest.raises(SpecError, match="loopback"):
            serve([shelf], host=host)


def test_a_port_in_use_is_one_sentence() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"port {port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", port)


def test_the_command_prints_one_address_serves_and_ends_on_ctrl_c(shelf: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "fedsim.cli", "view", str(shelf)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{20,})", address)
        assert found, address
        asked = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=20)
        asked.request("GET", "/")
        assert asked.getresponse().read().count(b"\n") == 1
        asked.request("GET", f"/?token={found[2]}")
        answer = asked.getresponse()
        answer.read()
        cookie = {"Cookie": str(answer.headers["Set-Cookie"]).partition(";")[0]}
        asked.request("GET", "/", headers=cookie)
        assert b"done" in asked.getresponse().read()
        for path in ("/../../../../etc/passwd", "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd"):
            asked.request("GET", path, headers=cookie)
            answer = asked.getresponse()
            assert (answer.status, b"root:" in answer.read()) == (404, False)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert rest == ""
    assert "Traceback" not in errors
    assert "stopped." in errors


# In a browser.


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """A server in a thread, on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


def browse(address: str, profile: Path) -> tuple[str, str]:
    """The page as a browser has it after its scripts ran, and what it complained of."""
    quiet = [
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    ]
    seen = subprocess.run(
        [
            *("chromium", *quiet, f"--user-data-dir={profile}"),
            *("--enable-logging=stderr", "--v=0", "--window-size=1200,900"),
            *("--virtual-time-budget=6000", "--dump-dom", address),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    return seen.stdout, seen.stderr


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium on PATH")
def test_a_browser_shows_progress_that_came_after_the_page(shelf: Path, tmp_path: Path) -> None:
    root = unfinished(shelf)
    guarded = create_app([shelf], TOKEN)
    late = root / "reconstructions" / "patch_solve" / "round-0002"
    missing = next(
        path.name
        for path in (shelf / "done" / late.relative_to(root)).iterdir()
        if not (late / path.name).exists()
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/api/runs":
            shutil.copy(shelf / "done" / late.relative_to(root) / missing, late / missing)
        await guarded(scope, receive, send)

    assert "2 of 8 jobs" in text(look(guarded, "/"))
    with served(app) as address:
        page, said = browse(f"{address}/?token={TOKEN.replace(' ', '+')}", tmp_path / "profile")
    assert ">live</span>" in page
    assert "1 of 2 rounds, 3 of 8 jobs, 1 failed" in page
    assert "CONSOLE" not in said


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium on PATH")
def test_no_page_needs_sideways_scroll_on_a_phone(two: Path, tmp_path: Path) -> None:
    shelf = tmp_path / "runs"
    shutil.copytree(two, shelf)
    shutil.copytree(shelf / "plain", shelf / "done")
    root = unfinished(shelf, "a-run-with-a-name-that-is-much-too-long-for-the-screen-of-a-phone")
    guarded = create_app([shelf], TOKEN)
    compared = comparison(guarded, "plain", "noisy", "done")
    paths = ["/", f"/runs/{key_of(root)}", f"/runs/{key_of(shelf / 'plain')}", compared]
    frames = "".join(
        f'<iframe width="390" height="800" src="{p}{"&" if "?" in p else "?"}'
        f'token={TOKEN.replace(" ", "+")}"></iframe>'
        for p in paths
    )
    script = (
        "onload = () => setTimeout(() => { answer.textContent = [...document.querySelectorAll("
        "'iframe')].map(f => { const d = f.contentDocument.documentElement; return "
        "`${d.scrollWidth} ${[...d.querySelectorAll('img')].every(i => i.naturalWidth && i.alt)} "
        "${d.querySelectorAll('h1').length}`; }).join(', '); }, 500);"
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/phones":
            page = HTMLResponse(f'{frames}<p id="answer"></p><script>{script}</script>')
            await page(scope, receive, send)
        else:
            await guarded(scope, receive, send)

    with served(app) as address:
        page, said = browse(f"{address}/phones", tmp_path / "profile")
    found = re.search(r'id="answer">([^<]*)<', page)
    assert found, said
    for path, told in zip(paths, found[1].split(", "), strict=True):
        width, pictures, headings = told.split()
        assert int(width) <= 390, path
        assert (pictures, headings) == ("true", "1"), path
    assert "CONSOLE" not in said

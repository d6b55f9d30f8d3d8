"""The viewer: who may look, what can be reached, how runs stand, and what lies side by side."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
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
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedsim.auditing import audit
from fedsim.core.errors import RunError, SpecError
from fedsim.core.store import Run
from fedsim.viewer.app import create_app
from fedsim.viewer.charts import Series, curves
from fedsim.viewer.files import Files
from fedsim.viewer.guard import Guard
from fedsim.viewer.serving import listen, serve
from fedsim.viewer.shelf import Shelf, short_names
from fedsim.viewer.standing import QUIET_SECONDS, Standing, standing
from tests.conftest import small_spec

TOKEN = "a token for tests"
ROOT = Path(__file__).parent.parent


def ask(app: ASGIApp, path: str, method: str = "GET", **options: Any) -> httpx.Response:
    """One request, without following redirects."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        base = "http://127.0.0.1:8000"
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def look(app: Guard, path: str) -> httpx.Response:
    """One request of somebody who was let in."""
    cookies = ask(app, "/", params={"token": TOKEN}).cookies
    return ask(app, path, headers={"Cookie": "; ".join(f"{k}={v}" for k, v in cookies.items())})


def text(answer: httpx.Response) -> str:
    """What a reader sees of a page."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", answer.text)))


@pytest.fixture
def shelf(small_run: Run, tmp_path: Path) -> Path:
    """A folder with a copy of the finished run in it."""
    shutil.copytree(small_run.root, tmp_path / "runs" / "done")
    return tmp_path / "runs"


def unfinished(shelf: Path, name: str = "half") -> Path:
    """A copy that looks as if it were still at work: one round, one job failed, two to come."""
    root = shelf / name
    shutil.copytree(shelf / "done", root)
    for gone in ("summary.json", "report.html", "scores.csv", "scores.parquet"):
        (root / gone).unlink()
    shutil.rmtree(root / "reconstructions" / "prior_only")
    results = sorted((root / "reconstructions/patch_solve").glob("*/*.safetensors"))
    results[-1].unlink()
    results[0].unlink()
    failure = {"job": "a job", "attack": "patch_solve", "kind": "crashed", "reason": "no memory"}
    results[0].with_suffix(".failed.json").write_text(json.dumps(failure))
    rounds = (root / "rounds.csv").read_text().splitlines()
    (root / "rounds.csv").write_text("\n".join(rounds[:2]) + "\n")
    return root


def planned(shelf: Path, name: str = "new") -> Path:
    (shelf / name).mkdir()
    shutil.copy(shelf / "done" / "spec.yaml", shelf / name / "spec.yaml")
    return shelf / name


def stands(root: Path, **options: Any) -> Standing:
    return standing(Files(), Shelf([root]).runs()[0], **options)


def key_of(root: Path) -> str:
    return Shelf([root]).runs()[0].key


# Who may look.


def test_without_the_token_there_is_one_sentence_and_nothing_else(shelf: Path) -> None:
    app = create_app([shelf], TOKEN)
    for path in ("/", "/api/runs", f"/runs/{key_of(shelf)}/report", "/assets/view.css", "/nothing"):
        for query in ("", "?token=", "?token=wrong"):
            answer = ask(app, path + query)
            assert answer.status_code == 403
            assert answer.text.count("\n") == 1
            assert "fedsim view" in answer.text
            assert not answer.cookies


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_cannot_use(shelf: Path) -> None:
    app = create_app([shelf], TOKEN)
    answer = ask(app, "/compare", params={"token": TOKEN, "run": "x"})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/compare?run=x"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert TOKEN not in answer.headers["set-cookie"]
    assert look(app, "/").status_code == 200
    forged = ask(app, "/", headers={"Cookie": f"{app.cookie}={TOKEN}"})
    assert forged.status_code == 403


def test_a_token_at_a_crooked_path_sends_nobody_to_another_site(shelf: Path) -> None:
    app = create_app([shelf], TOKEN)
    scope: dict[str, Any] = {"type": "http", "method": "GET", "headers": [(b"host", b"localhost")]}
    scope |= {"path": "//evil.example/", "raw_path": b"//evil.example/", "scheme": "http"}
    scope |= {"query_string": f"token={TOKEN.replace(' ', '+')}".encode(), "root_path": ""}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, None, send))  # type: ignore[arg-type]
    where = dict(sent[0]["headers"])[b"location"].decode()
    assert sent[0]["status"] == 303
    assert where.startswith("/")
    assert not where.startswith("//")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("[::1]:8000", 200),
        ("evil.example:8000", 400),
        ("127.0.0.1.evil.example", 400),
        ("localhost.evil.example:8000", 400),
        ("[::1", 400),
        ("192.168.0.7:8000", 400),
        ("0.0.0.0:8000", 400),
        ("", 400),
    ],
)
def test_only_loopback_names_are_answered(shelf: Path, host: str, status: int) -> None:
    app = create_app([shelf], TOKEN)
    cookies = ask(app, "/", params={"token": TOKEN}).cookies
    cookie = "; ".join(f"{k}={v}" for k, v in cookies.items())
    assert ask(app, "/", headers={"Host": host, "Cookie": cookie}).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
def test_only_get_is_answered(shelf: Path, method: str) -> None:
    answer = ask(create_app([shelf], TOKEN), "/", method, params={"token": TOKEN})
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET"
    assert not answer.cookies


def test_every_answer_forbids_other_sites_and_caches(shelf: Path) -> None:
    app, key = create_app([shelf], TOKEN), key_of(shelf)
    paths = ["/", "/api/runs", f"/runs/{key}", f"/runs/{key}/report", "/assets/live.js", "/nothing"]
    for answer in [*(look(app, path) for path in paths), ask(app, "/")]:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert not re.search(r"https?:|\*", policy)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_report_is_shown_as_it_is_in_an_origin_of_its_own(shelf: Path) -> None:
    app, key = create_app([shelf], TOKEN), key_of(shelf)
    answer = look(app, f"/runs/{key}/report")
    assert answer.content == (shelf / "done" / "report.html").read_bytes()
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("sandbox")
    assert "allow-same-origin" not in policy
    assert f"/runs/{key}/report" in look(app, f"/runs/{key}").text


# What can be reached.


def test_no_path_leads_out_of_the_runs_or_into_the_vault(shelf: Path) -> None:
    (shelf.parent / "secret.txt").write_text("a secret")
    app, key = create_app([shelf], TOKEN), key_of(shelf)
    truth = next(path.relative_to(shelf) for path in shelf.glob("done/vault/*/*.safetensors"))
    tries = [
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        f"/runs/{key}/../../secret.txt",
        f"/runs/{key}/%2e%2e%2f%2e%2e%2fsecret.txt",
        "/runs/..%2f..%2fsecret.txt/report",
        "/runs/%2e%2e/report",
        "/assets/../app.py",
        "/assets/%2e%2e%2fapp.py",
        f"/runs/{key}/vault",
        f"/runs/{key}/{truth.relative_to('done')}",
        f"/{truth}",
        f"/runs/{key}/spec.yaml",
        f"/runs/{key}/reconstructions/patch_solve",
        f"/compare?run={key}&run=../../secret.txt",
        f"/compare?run={key}&run={shelf.parent}",
    ]
    for path in tries:
        answer = look(app, path)
        assert answer.status_code == 404, path
        assert "a secret" not in answer.text


def test_a_link_out_of_the_run_is_not_followed(shelf: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.html"
    secret.write_text("a secret")
    root = shelf / "done"
    (root / "report.html").unlink()
    (root / "report.html").symlink_to(secret)
    (shelf / "elsewhere").symlink_to(tmp_path)
    app, key = create_app([shelf], TOKEN), key_of(shelf)
    assert look(app, f"/runs/{key}/report").status_code == 404
    assert [run["name"] for run in look(app, "/api/runs").json()["runs"]] == ["done"]
    (root / "summary.json").unlink()
    (root / "summary.json").symlink_to(secret)
    assert "leaves the run's directory" in text(look(create_app([shelf], TOKEN), "/"))


def test_pictures_behind_links_are_not_compared(shelf: Path) -> None:
    shutil.copytree(shelf / "done", shelf / "linked")
    vault = shelf / "linked" / "vault"
    shutil.rmtree(vault)
    vault.symlink_to(shelf / "done" / "vault")
    page = look(app := create_app([shelf], TOKEN), _compare(app, "done", "linked"))
    assert "No picture of it can be shown" in page.text
    assert "did not attack the same pictures" in text(page)


def test_a_pipe_in_the_place_of_a_report_stops_nobody(shelf: Path) -> None:
    (shelf / "done" / "summary.json").unlink()
    os.mkfifo(shelf / "done" / "summary.json")
    assert stands(shelf).state == "damaged"


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
    for path in ("/", f"/runs/{runs['bad']['key']}", _compare(app, "bad", "done")):
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


def _compare(app: Guard, *names: str) -> str:
    keys = {run["name"]: run["key"] for run in look(app, "/api/runs").json()["runs"]}
    return "/compare?" + "&".join(f"run={keys[name]}" for name in names)


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
    page = look(app, _compare(app, "plain", "noisy"))
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
    page = look(app, _compare(app, "plain", "seeded"))
    assert "did not attack the same pictures" in text(page)
    assert "pictures that both runs attacked" not in text(page)
    assert page.text.count('class="pair"') == 8


def test_an_unfinished_run_lies_beside_a_finished_one(shelf: Path) -> None:
    unfinished(shelf)
    app = create_app([shelf], TOKEN)
    shown = text(look(app, _compare(app, "done", "half")))
    assert "the specs are the same" in shown
    assert "no result yet" in shown
    assert "1 of 2 rounds" in shown


def test_damaged_pictures_leave_the_rest_of_a_comparison(shelf: Path) -> None:
    shutil.copytree(shelf / "done", shelf / "bad")
    for path in (shelf / "bad" / "reconstructions").glob("*/*/*.safetensors"):
        path.write_bytes(b"nothing")
    app = create_app([shelf], TOKEN)
    page = look(app, _compare(app, "bad", "done"))
    assert page.status_code == 200
    assert "Its pictures cannot be shown" in text(page)
    assert page.text.count('class="pair"') == 4  # those of the other


def test_a_comparison_asks_for_two_to_four_runs_that_are_here(two: Path) -> None:
    app = create_app([two], TOKEN)
    assert look(app, _compare(app, "plain")).status_code == 400
    assert look(app, _compare(app, "plain", "plain")).status_code == 400
    assert look(app, "/compare").status_code == 400
    assert look(app, _compare(app, "plain") + "&run=unknown").status_code == 404


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
    compared = _compare(guarded, "plain", "noisy", "done")
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

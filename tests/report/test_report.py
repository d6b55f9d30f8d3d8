"""The report: one page that needs nothing else, verdict first."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from fedsim.core.run import Run
from tests.report.conftest import EXACT, FAILS, Page, make_run


def test_report_refers_to_nothing_outside_itself(leaking: Run) -> None:
    page = Page(leaking)
    addresses = [a[key] for _, a in page.tags for key in ("src", "href", "xlink:href") if key in a]
    assert addresses
    assert all((address or "").startswith(("data:", "#")) for address in addresses)
    assert not page.all("script")
    assert "http://" not in page.source
    assert "https://" not in page.source
    assert not re.search(r"@import|url\((?!#)", page.source)
    assert any(link.get("rel") == "icon" for link in page.all("link"))


def test_verdict_comes_first(leaking: Run) -> None:
    text = Page(leaking).text
    body = text[text.index("fedsim audit", text.index("(fedsim audit)") + 15) :]
    order = ["LEAKS", "The attacker reconstructed all 4 attacked pictures.", "Model", "Scores"]
    places = [body.index(part) for part in order]
    assert places == sorted(places)
    assert len(Page(leaking).all("h1")) == 1


def test_every_picture_has_words_and_headings_do_not_skip(leaking: Run) -> None:
    page = Page(leaking)
    assert len(page.all("img")) == 2 + 2 * 4 * 3  # the closest pair; two attacks and the baseline
    assert all(image.get("alt") for image in page.all("img"))
    assert all(drawing.get("aria-label") for drawing in page.all("svg"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_a_hostile_name_is_only_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"exact": EXACT}, name="<script>alert(1)</script>")
    page = Page(run)
    assert not page.all("script")
    assert "<script>" not in page.source
    assert "<script>alert(1)</script>" in page.text


def test_a_run_whose_jobs_all_failed_still_has_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"broken": FAILS}, threat="A")
    page = Page(run)
    assert "No conclusion: no attack produced a result." in page.text
    assert "There is no reconstruction to show." in page.text
    assert not page.all("img")
    assert not (run.root / "grid.png").exists()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium on PATH")
def test_a_browser_opens_it_without_complaint_and_a_phone_needs_no_sideways_scroll(
    leaking: Run, tmp_path: Path
) -> None:
    frame = tmp_path / "phone.html"
    frame.write_text(
        f'<iframe id="phone" width="390" height="800" src="{leaking.report.as_uri()}"></iframe>'
        '<p id="answer"></p><script>onload = () => {'
        "const page = phone.contentDocument.documentElement;"
        "const plain = [...page.querySelectorAll('img')].every(i => i.naturalWidth > 0);"
        "answer.textContent = `width ${page.scrollWidth} pictures ${plain}`;"
        "}</script>"
    )
    quiet = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    ]
    seen = subprocess.run(
        [
            *("chromium", *quiet, f"--user-data-dir={tmp_path / 'profile'}"),
            *("--allow-file-access-from-files", "--enable-logging=stderr", "--v=0"),
            *("--virtual-time-budget=3000", "--dump-dom", frame.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = re.search(r"width (\d+) pictures (\w+)</p>", seen.stdout)
    assert found, seen.stderr
    assert int(found[1]) <= 390
    assert found[2] == "true"
    assert "CONSOLE" not in seen.stderr

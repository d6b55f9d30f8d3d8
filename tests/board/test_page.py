"""The page: it needs nothing else, nothing of a run is markup, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedsim.board import build_board, enter, publish, write_submission
from fedsim.board.page import Built
from fedsim.core.errors import RunError
from fedsim.core.files import read_json, write_json
from fedsim.core.run import Run
from tests.board.conftest import HOSTILE, images_of, made

ROOT = Path(__file__).parents[2]
browser = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="there is no chromium on PATH"
)


class Tags(HTMLParser):
    """The tags of a page with their attributes."""

    def __init__(self, page: Path):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def test_the_page_refers_to_nothing_outside_itself(built: Built) -> None:
    tags = Tags(built.page)
    addresses = [a[key] or "" for _, a in tags.found for key in ("src", "href") if key in a]
    assert addresses
    assert all(address.startswith("data:image/") for address in addresses)
    assert len(tags.all("script")) == 1
    policy = next(m["content"] for m in tags.all("meta") if "http-equiv" in m) or ""
    assert "default-src 'none'" in policy
    assert re.search(r"script-src 'sha256-[\w+/=]{44}';", policy)
    assert all(image.get("alt") for image in tags.all("img"))


def test_every_federation_is_a_section_and_every_defense_a_row(built: Built) -> None:
    tags = Tags(built.page)
    entries = [a for a in tags.all("tr") if (a.get("class") or "").startswith("entry")]
    assert len(entries) == 6
    assert len([a for a in tags.all("section") if a.get("class") == "federation"]) == 2
    assert sum("dominated" in (a["class"] or "") for a in entries) == 2
    assert sum("flagged" in (a["class"] or "") for a in entries) == 1


def test_words_of_a_run_and_of_a_submission_are_text_not_markup(
    measured: Run, shelf: dict[str, Run], tmp_path: Path
) -> None:
    publish(measured, tmp_path / "out")
    write_submission(tmp_path / "f", images_of(measured), tmp_path / "out", "mine")
    enter(measured, tmp_path / "f", "O'Neill", "https://a.org/?a=1&b=2")
    summary = measured.summary
    summary["suite"]["flags"] = [{"flag": "</td><b>", "words": "<script>alert(1)</script>"}]
    summary["versions"]["commit"] = HOSTILE
    write_json(measured.summary_path, summary)
    (tmp_path / HOSTILE).mkdir()
    odd = [measured.root, shelf["doubted"].root, tmp_path / HOSTILE]
    page = build_board(odd, tmp_path / "board").page
    tags = Tags(page)
    assert not any("onerror" in a for _, a in tags.found)
    assert len(tags.all("script")) == 1
    assert HOSTILE in unescape(re.sub(r"<[^>]*>", "", page.read_text()))
    links = tags.all("a")
    assert {a["href"] for a in links} == {"https://a.org/?a=1&b=2"}
    assert all("noopener" in (a["rel"] or "") for a in links)


def test_a_record_forged_in_a_run_puts_no_link_on_the_page(measured: Run, tmp_path: Path) -> None:
    publish(measured, tmp_path / "out")
    write_submission(tmp_path / "f", images_of(measured), tmp_path / "out", "mine")
    enter(measured, tmp_path / "f", "me")
    (file,) = measured.submissions.iterdir()
    for change in ({"link": "javascript:alert(1)"}, {"name": "<b>"}, {"attack": HOSTILE}):
        forged = read_json(file) | change
        write_json(measured.submissions / "forged.json", forged)  # with a seal of its own
        built = build_board([measured.root], tmp_path / "board")
        assert "damaged" in built.notes[0]
        assert not Tags(built.page).all("a")


def test_redacted_it_has_no_picture(shelf: dict[str, Run], tmp_path: Path) -> None:
    roots = [run.root for run in shelf.values()]
    page = build_board(roots, tmp_path, redacted=True).page
    assert page.name == "board-redacted.html"
    assert not (tmp_path / "board.html").exists()
    assert not Tags(page).all("img")
    assert page.read_text().count("data:image") == 1  # its icon
    assert "left out of this page" in page.read_text()


def test_a_board_of_nothing_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no run enters the board: nowhere: .* holds no run"):
        build_board([tmp_path / "nowhere"], tmp_path / "board")
    assert not (tmp_path / "board").exists()


def test_sections_that_would_be_called_the_same_are_numbered(tmp_path: Path) -> None:
    runs = [
        made(tmp_path / name, 0.1, train={"rounds": 2, "lr": lr})
        for name, lr in (("a", 0.1), ("b", 0.2))
    ]
    text = build_board([run.root for run in runs], tmp_path / "board").page.read_text()
    assert "threat C (2)</h2>" in text


def test_the_style_uses_only_colours_that_it_has() -> None:
    own = (ROOT / "fedsim/board/board.css").read_text()
    defined = set(re.findall(r"(--[\w-]+):", own + (ROOT / "fedsim/report/style.css").read_text()))
    assert set(re.findall(r"var\((--[\w-]+)\)", own)) <= defined


# -- in a browser ---------------------------------------------------------------------------------

HELPERS = """
const page = board.contentDocument, answer = {};
const all = (words, place = page) => [...place.querySelectorAll(words)];
const shown = (place) => place.getClientRects().length > 0;
const name = (row) => row.querySelector(".name").textContent;
const names = () => all("tr.entry").filter(shown).map(name);
const count = () => page.getElementById("count").textContent;
const head = (title) => all("th button.sort").find((b) => b.textContent.startsWith(title));
const put = (field, value) => {
  page.getElementById(field).value = value;
  page.getElementById(field).dispatchEvent(new Event("input", { bubbles: true }));
};
"""


def browse(page: Path, folder: Path, steps: str, width: int = 1280) -> dict[str, Any]:
    """What a script that uses the page finds on it; a complaint of the browser is an error."""
    frame = folder / "frame.html"
    frame.write_text(
        f'<iframe id="board" width="{width}" height="800" src="{page.as_uri()}"></iframe>'
        f'<p id="told"></p><script>onload = () => {{ {HELPERS} {steps}'
        "told.textContent = JSON.stringify(answer); }</script>"
    )
    quiet = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    ]
    seen = subprocess.run(
        [
            *("chromium", *quiet, f"--user-data-dir={folder / 'profile'}"),
            *("--allow-file-access-from-files", "--enable-logging=stderr", "--v=0"),
            *("--virtual-time-budget=3000", "--dump-dom", frame.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    found = re.search(r'<p id="told">(.*?)</p>', seen.stdout, re.DOTALL)
    assert found, seen.stderr
    assert "CONSOLE" not in seen.stderr
    assert found[1], seen.stderr
    answer: dict[str, Any] = json.loads(unescape(found[1]))
    return answer


@browser
def test_a_browser_sorts_filters_and_opens_rows(built: Built, tmp_path: Path) -> None:
    steps = """
    answer.first = names();
    head("Worst case").click(); answer.worst = names();
    head("Worst case").click(); answer.least = names();
    answer.said = head("Worst case").closest("th").getAttribute("aria-sort");
    head("Accuracy kept").focus();
    answer.focus = page.activeElement.textContent;
    page.activeElement.click(); answer.accurate = names();
    head("Membership").click(); answer.membership = names();
    head("Membership").click(); answer.other = names();
    head("Defense").click(); answer.byname = names();
    answer.pairs = all("tr.entry").every((row) => row.nextElementSibling.id
      === row.querySelector(".toggle").getAttribute("aria-controls"));
    put("find", "noise 0.3"); answer.found = names(); answer.count = count();
    put("find", "<img"); answer.flagged = names();
    put("find", "nothing of the kind"); answer.none = count();
    put("find", ""); put("threat", "D"); answer.threat = names();
    put("threat", ""); put("federation", all(".federation")[0].dataset.federation);
    answer.federation = names().length; put("federation", "");
    const grey = (words) => getComputedStyle(all(words)[0]).color;
    answer.grey = grey("tr.dominated > td") !== grey("tr.entry:not(.dominated) > td");
    const toggle = all(".toggle")[0];
    const more = page.getElementById(toggle.getAttribute("aria-controls"));
    answer.before = shown(more);
    toggle.click(); answer.opened = shown(more);
    answer.expanded = toggle.getAttribute("aria-expanded");
    answer.pictures = all("img", more).length;
    answer.whole = all("img", more).every((image) => image.complete && image.naturalWidth > 0);
    toggle.click(); answer.closed = shown(more);
    answer.width = page.documentElement.scrollWidth;
    """
    told = browse(built.page, tmp_path, steps)
    other = ["none"]  # the second federation's only row
    assert told["worst"] == told["first"]
    assert told["first"][0] == "none"
    assert told["least"] == [
        "quantization",
        "top_k",
        "gaussian_noise",
        "gaussian_noise",
        "none",
        *other,
    ]
    assert told["said"] == "ascending"
    assert told["focus"].startswith("Accuracy kept")
    assert told["accurate"][-3:] == ["top_k", "gaussian_noise", *other]
    assert told["membership"][0] == told["other"][0] == "none"  # the others have no value: last
    assert told["byname"] == sorted(told["byname"][:-1]) + other
    assert told["pairs"]
    assert told["found"] == ["gaussian_noise"]
    assert told["count"] == "1 of 6 rows"
    assert told["flagged"] == []
    assert told["none"] == "No row fits."
    assert told["threat"] == other
    assert told["federation"] == 5
    assert told["grey"]
    assert (told["before"], told["opened"], told["closed"]) == (False, True, False)
    assert (told["expanded"], told["pictures"], told["whole"]) == ("true", 6, True)
    assert told["width"] <= 1280


@browser
def test_a_phone_needs_no_sideways_scroll_of_the_page(built: Built, tmp_path: Path) -> None:
    steps = """
    all(".toggle").forEach((button) => button.click());
    answer.width = page.documentElement.scrollWidth;
    const box = all(".scroll")[0], inner = all(".inner")[0].getBoundingClientRect();
    answer.wider = box.scrollWidth > box.clientWidth;
    answer.inside = inner.left >= 0 && inner.right <= 390;
    box.scrollLeft = 300;
    answer.stays = all("tr.entry > th")[0].getBoundingClientRect().left >= 0;
    answer.follows = all(".inner")[0].getBoundingClientRect().right <= 390;
    """
    told = browse(built.page, tmp_path, steps, width=390)
    assert told["width"] <= 390
    assert all(told[name] for name in ("wider", "inside", "stays", "follows"))

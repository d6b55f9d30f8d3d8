"""The report, from run directories whose pictures, failures and canaries are made to order."""

from __future__ import annotations

import base64
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fedsim.audit.stages import conclude
from fedsim.campaign.plan import jobs_of, victims
from fedsim.core.attack import BASELINE, Reconstruction
from fedsim.core.files import write_json
from fedsim.core.run import Run, observation_name
from fedsim.core.spec import load_spec
from fedsim.core.vault import Truth, Vault
from fedsim.report import content, formats, pictures, plots

EXACT, CLOSE, BLIND, FAILS = 0.0, 0.1, 0.45, None


def make_run(
    root: Path,
    attacks: dict[str, float | None],
    *,
    batch: int = 1,
    clients: int = 2,
    canary: float = 0.0,
    evaluate: bool = True,
    side: int = 16,
    photos: torch.Tensor | None = None,
    filmed: str = "",
    **spec: Any,
) -> Run:
    """A finished run: each attack returns the truth with that much noise on it, or fails."""
    content = {
        "attacks": [{"name": name} for name in attacks],
        "data": {"image_size": side, "clients": clients},
        "train": {"rounds": 2, "batch_size": batch},
        "audit": {"rounds": [2], "gallery": 0},  # noise is told from photographs by itself
        **spec,
    }
    run = Run.create(root, load_spec(content))
    coin = torch.Generator().manual_seed(0)
    vault = Vault(run.vault)
    chosen = victims(run.spec)
    for number, (round_, client) in enumerate(chosen):
        images = (
            torch.rand(batch, 3, side, side, generator=coin)
            if photos is None
            else photos[[(number * batch + i) % len(photos) for i in range(batch)]]
        )
        labels = torch.arange(batch) + client
        vault.write(round_, client, Truth(images, labels, [list(range(batch))], 0, []))
    write_json(run.root / "canaries.json", {observation_name(r, c): canary for r, c in chosen})
    for job in jobs_of(run, run.spec, chosen):
        noise = BLIND if job.label == BASELINE else attacks[job.label]
        if noise is None:
            about = {"job": job.name, "attack": job.label, "kind": "declined"}
            write_json(job.failure, {**about, "reason": "the update has no <patch> embedding."})
            continue
        truth = vault.read(job.round, job.client)
        guess = truth.images + noise * torch.randn(truth.images.shape, generator=coin)
        if noise == BLIND:
            guess = torch.rand(truth.images.shape, generator=coin)
        if job.label == BASELINE:
            guess = torch.full_like(guess, 0.5)
        Reconstruction(
            images=guess.clamp(0, 1),
            labels=None if job.label == BASELINE else truth.labels,
            loss=noise,
            trace=[(s, 1 / (s + 1) + noise) for s in range(50) if job.label != BASELINE],
            notes=[] if noise == EXACT else [f"{5 + job.client}e-3 of a step away"],
            ledger=["update", "weights"],
            seconds=1.5,
            film={1: guess[:1].clamp(0, 1), 9: truth.images[:1]} if filmed == job.label else {},
        ).save(job.result)
    rows = [
        {
            "round": r,
            "train_loss": 2.0 / r,
            "test_loss": 2.1 / r if evaluate else None,
            "test_accuracy": 0.3 * r if evaluate else None,
        }
        for r in (1, 2)
    ]
    run.write_table("rounds", pd.DataFrame(rows))
    conclude(run, seconds=12.0)
    return run


class Page(HTMLParser):
    """The tags of a report, and its text in order."""

    def __init__(self, run: Run):
        super().__init__()
        self.source = run.report.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.inside = "", ""
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_data(self, data: str) -> None:
        if self.inside != "style":
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def leaking(tmp_path_factory: pytest.TempPathFactory) -> Run:
    attacks = {"exact": EXACT, "blurry": CLOSE, "broken": FAILS}
    return make_run(tmp_path_factory.mktemp("report") / "run", attacks, batch=2)


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


def test_small_pictures_keep_their_pixels_and_large_ones_do_not(leaking: Run) -> None:
    assert {image["class"] for image in Page(leaking).all("img")} == {"small"}
    pair = pictures.Pair({}, torch.zeros(3, 160, 160), torch.zeros(3, 160, 160), False)
    assert pair.look == "large"


def test_an_attack_without_a_result_says_so_and_gives_its_reason(leaking: Run) -> None:
    page = Page(leaking)
    assert "broken gave no result: the update has no <patch> embedding." in page.text
    assert "This says nothing about safety." in page.text
    assert "broken on round-0002/client-0000, trial 0 and 1 more (declined)" in page.text


def test_notes_and_ledger_and_command_are_there(leaking: Run) -> None:
    text = re.sub(r"\s+", " ", Page(leaking).text)
    assert "5e-3 of a step away (2 of 2 jobs, each with its own numbers)" in text
    assert "exact: update, weights" in text
    assert "fedsim audit spec.yaml -o DIR" in text
    assert leaking.spec.digest() in text


def test_a_hostile_name_is_only_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"exact": EXACT}, name="<script>alert(1)</script>")
    page = Page(run)
    assert not page.all("script")
    assert "<script>" not in page.source
    assert "<script>alert(1)</script>" in page.text


def test_oracle_labels_are_announced_and_absent_otherwise(tmp_path: Path, leaking: Run) -> None:
    words_ = "Labels were given to the attacker by an oracle"
    threat = {"model": "C", "oracle_labels": True}
    text = Page(make_run(tmp_path / "run", {"exact": EXACT}, threat=threat)).text
    assert text.index(words_) < text.index("The attacker reconstructed")
    assert "the true labels of the private batch" in text
    assert words_ not in Page(leaking).text


def test_a_failed_canary_is_announced_and_nothing_is_concluded(tmp_path: Path) -> None:
    page = Page(make_run(tmp_path / "run", {"blurry": BLIND}, canary=0.3))
    assert "The canary failed for 2 of 2 attacked updates." in page.text
    assert "No conclusion: the attacks did not simulate what the clients did." in page.text
    assert "worst relative error 0.3" in page.text


def test_a_picture_that_came_back_is_told_whatever_the_canary_says(tmp_path: Path) -> None:
    text = Page(make_run(tmp_path / "run", {"exact": EXACT}, canary=0.3)).text
    assert "The attacker reconstructed all 2 attacked pictures." in text
    assert "The canary failed for 2 of 2 attacked updates." in text


def test_not_recovered_never_reads_as_safe(tmp_path: Path) -> None:
    text = Page(make_run(tmp_path / "run", {"blind": BLIND}, evaluate=False)).text
    assert "The attacks in this run did not recover a picture." in text
    assert "not about the clients' safety" in text
    assert "there is no accuracy" in text


def test_a_run_whose_jobs_all_failed_still_has_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"broken": FAILS}, threat="A")
    page = Page(run)
    assert "No conclusion: no attack produced a result." in page.text
    assert "There is no reconstruction to show." in page.text
    assert not page.all("img")
    assert not (run.root / "grid.png").exists()


def test_five_hundred_images_are_sampled_from_best_to_worst() -> None:
    rows = pd.DataFrame({"psnr": [float(i) for i in range(500)]})
    shown = pictures.spread(rows, pictures.MOST_SHOWN)["psnr"].tolist()
    assert len(shown) == pictures.MOST_SHOWN
    assert (shown[0], shown[-1]) == (499.0, 0.0)
    assert shown == sorted(shown, reverse=True)
    gallery = pictures.Gallery("x", "LEAKS", [], 500, [], "")
    assert "500 more are in the run directory" in gallery.extent


def test_grid_is_a_contact_sheet_of_the_strongest_attack(leaking: Run) -> None:
    with Image.open(leaking.root / "grid.png") as sheet:
        assert sheet.size == (50 + 4 * 136 - 8 + 24, 60 + 300 + 10)


def test_plots_survive_gaps() -> None:
    gaps = pd.DataFrame(
        {
            "round": [1.0, 2.0],
            "train_loss": [None, 1.0],
            "test_loss": [None] * 2,
            "test_accuracy": [None] * 2,
        }
    ).astype(float)
    assert len(plots.training(gaps)) == 1
    assert plots.training(gaps.iloc[:0]) == []
    scores = pd.DataFrame({"attack": ["a$_b", "c"], "psnr": [12.0, float("nan")]})
    drawing = plots.strip(scores, ["a$_b", "c"])
    assert drawing is not None
    assert "a$_b" in drawing
    assert "nan" not in drawing
    assert plots.strip(scores.iloc[:0], ["a"]) is None
    assert "var(--accent)" in plots.trace("a", [[(0, 1.0), (1, float("nan")), (2, 1e-4)]])


@pytest.mark.parametrize(
    ("filter_", "value", "text"),
    [
        ("number", None, "–"),
        ("number", float("nan"), "–"),
        ("number", -0.001, "0.00"),
        ("number", -0.25, "−0.25"),
        ("decibel", 160.0, "160 dB (exact)"),
        ("decibel", 31.26, "31.3 dB"),
        ("percent", 0.0, "0 %"),
        ("small", 3.2e-5, "3.2 × 10⁻⁵"),
        ("small", 0.0, "0"),
        ("seconds", 0.01, "< 0.1"),
        ("duration", 7200.0, "2.0 h"),
        ("label", 3.0, "3"),
        ("label", float("nan"), "–"),
    ],
)
def test_numbers_read_well(filter_: str, value: float | None, text: str) -> None:
    assert formats.FILTERS[filter_](value) == text


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


def test_a_film_shows_how_the_closest_picture_came_about(tmp_path: Path) -> None:
    attacks = {"exact": EXACT, "close": CLOSE}
    page = Page(make_run(tmp_path / "run", attacks, filmed="close"))
    alts = [image.get("alt") or "" for image in page.all("img")]
    assert [alt for alt in alts if "first image after step" in alt] == [
        "The attack's first image after step 1",
        "The attack's first image after step 9",
    ]


def test_a_redacted_report_shows_no_picture_of_a_client(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"exact": EXACT, "close": CLOSE}, side=40, filmed="close")
    whole = run.report.read_bytes()
    path = conclude(run, redacted=True)
    assert path == run.root / "report-redacted.html"
    assert run.report.read_bytes() == whole  # the full one stays as it was
    page = path.read_text()
    assert "withheld" in page
    assert "recovered as" not in page
    truth = Vault(run.vault).read(*victims(run.spec)[0]).images[0]
    assert pictures.data_uri(truth) in whole.decode()
    assert pictures.data_uri(truth) not in page
    for uri in re.findall(r'src="data:image/png;base64,([^"]+)"', page):
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri))).convert("RGB"))
        assert len(np.unique(shown.reshape(-1, 3), axis=0)) <= 25  # a mosaic of five by five


def test_the_most_exposed_client_and_the_comparisons_are_told(tmp_path: Path) -> None:
    text = Page(make_run(tmp_path / "run", {"exact": EXACT, "close": CLOSE})).text
    assert "Who is exposed most" in text
    assert "Attack against attack" in text
    assert "Leakage over training" not in text  # one round says nothing about training


def test_a_promised_budget_is_in_the_report(tmp_path: Path) -> None:
    noisy = [{"name": "dp_sgd", "noise": 1.0}]
    text = Page(make_run(tmp_path / "run", {"close": CLOSE}, defenses=noisy)).text
    assert "dp_sgd promises one sample of a client epsilon" in text


def test_a_budget_without_noise_is_told_as_none_at_all() -> None:
    budget = {"defense": "dp_sgd", "epsilon": None, "delta": 1e-5, "protects": "one sample"}
    (told,) = content.privacy({"privacy": [budget]})
    assert "no epsilon at all" in told

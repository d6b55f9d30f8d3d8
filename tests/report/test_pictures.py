"""Pictures of a report: from best to worst, small ones with their pixels."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image

from fedsim.audit.stages import conclude
from fedsim.campaign.plan import victims
from fedsim.core.run import Run
from fedsim.core.vault import Vault
from fedsim.report import pictures
from tests.report.conftest import CLOSE, EXACT, Page, make_run


def test_small_pictures_keep_their_pixels_and_large_ones_do_not(leaking: Run) -> None:
    assert {image["class"] for image in Page(leaking).all("img")} == {"small"}
    pair = pictures.Pair({}, torch.zeros(3, 160, 160), torch.zeros(3, 160, 160), False)
    assert pair.look == "large"


def test_five_hundred_images_are_sampled_from_best_to_worst() -> None:
    rows = pd.DataFrame({"psnr": [float(i) for i in range(500)]})
    shown = pictures.spread(rows, pictures.MOST_SHOWN)["psnr"].tolist()
    assert len(shown) == pictures.MOST_SHOWN
    assert (shown[0], shown[-1]) == (499.0, 0.0)
    assert shown == sorted(shown, reverse=True)
    gallery = pictures.Gallery("x", "LEAKS", [], 500, [], "", 500)
    assert "500 more are in the run directory" in gallery.extent


def test_a_gallery_shows_the_pictures_that_its_attack_claims() -> None:
    rows = pd.DataFrame({"psnr": [9.0, 50.0, 8.0], "claimed": [False, True, False]})
    assert pictures.claimed_in(rows)["psnr"].tolist() == [50.0]
    nothing = rows.assign(claimed=False)
    assert len(pictures.claimed_in(nothing)) == len(pictures.claimed_in(rows[["psnr"]])) == 3
    gallery = pictures.Gallery("x", "LEAKS", [], 64, [], "", 1)
    assert gallery.extent.startswith("0 of the 1 images that it has a picture for, of 64 in all")


def test_grid_is_a_contact_sheet_of_the_strongest_attack(leaking: Run) -> None:
    with Image.open(leaking.root / "grid.png") as sheet:
        assert sheet.size == (50 + 4 * 136 - 8 + 24, 60 + 300 + 10)


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


def test_a_picture_that_was_augmented_is_shown_beside_the_view_of_it() -> None:
    row = {"psnr": 40.0, "ssim": 0.9, "psnr_original": 11.0, "round": 1, "client": 0}
    row |= {"in_batch": 1, "image": 0}
    view, own = torch.zeros(3, 16, 16), torch.ones(3, 16, 16)
    pair = pictures.Pair(row, view, view, False, before=own)
    assert pair.source == pictures.data_uri(own)
    assert pair.original == pictures.data_uri(view)
    assert pair.original_alt.startswith("Picture as the model saw it")
    assert pair.scores.endswith("; 11.0 dB against the original")
    assert pictures.Pair(row, view, view, False, redacted=True, before=own).source is None

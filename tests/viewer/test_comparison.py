"""Runs side by side."""

from __future__ import annotations

import shutil
from pathlib import Path

from fedsim.core.run import Run
from fedsim.viewer.app import create_app
from tests.viewing import TOKEN, comparison, look, text, unfinished


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


def test_pictures_behind_links_are_not_compared(shelf: Path) -> None:
    shutil.copytree(shelf / "done", shelf / "linked")
    vault = shelf / "linked" / "vault"
    shutil.rmtree(vault)
    vault.symlink_to(shelf / "done" / "vault")
    page = look(app := create_app([shelf], TOKEN), comparison(app, "done", "linked"))
    assert "No picture of it can be shown" in page.text
    assert "did not attack the same pictures" in text(page)

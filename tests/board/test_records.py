"""Records: a submission is scored like everything else, and nothing of the truth leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from fedsim.board import enter, publish, write_submission
from fedsim.board.entries import read_entries
from fedsim.board.records import Record, read_records
from fedsim.board.rows import rows_of
from fedsim.core.errors import RunError
from fedsim.core.files import read_json, write_json
from fedsim.core.run import Run
from tests.board.conftest import images_of


@pytest.fixture
def published(measured: Run, tmp_path: Path) -> Path:
    return publish(measured, tmp_path / "published").root


def submitted(run: Run, published: Path, images: dict[str, torch.Tensor], name: str) -> Record:
    """Some pictures, entered under a name."""
    file = published / "mine.safetensors"
    write_submission(file, images, published, "mine")
    return enter(run, file, name, "https://example.org/mine")


def test_a_submission_is_scored_by_the_scoring_of_everything_else(
    measured: Run, published: Path
) -> None:
    known = measured.scores
    own = known[known["attack"] == "patch_solve"]
    images = {
        f"round-{r:04d}/client-{c:04d}": measured.images("patch_solve", r, c)
        for r, c in own[["round", "client"]].to_numpy().tolist()
    }
    record = submitted(measured, published, images, "Somebody")
    both = record.table.merge(own, on=["round", "client", "image"])
    assert len(both) == len(own) == len(record.pictures)
    assert both["psnr_x"].tolist() == pytest.approx(both["psnr_y"].round(1).tolist())
    assert both["ssim_x"].tolist() == pytest.approx(both["ssim_y"].round(3).tolist())
    assert both["identified_x"].tolist() == both["identified_y"].tolist()


def test_the_record_holds_rounded_numbers_and_nothing_of_the_truth(
    measured: Run, published: Path
) -> None:
    record = submitted(measured, published, images_of(measured, 0.1), "Somebody")
    (file,) = measured.submissions.iterdir()
    told = json.loads(file.read_text())
    keys = {"round", "client", "image", "psnr", "ssim", "lpips", "identified", "recovered"}
    assert all(picture.keys() == keys for picture in told["pictures"])
    assert all(round(one.psnr, 1) == one.psnr and round(one.ssim, 3) == one.ssim
               for one in record.pictures)  # fmt: skip
    for digest in measured.scores["digest"]:
        assert digest not in file.read_text()


def test_the_board_shows_the_best_known_and_by_whom(measured: Run, published: Path) -> None:
    table = pd.read_csv(measured.root / "envelope.csv").assign(psnr=20.0, recovered=False)
    measured.write_table("envelope", table)
    (before,) = rows_of(read_entries([measured.root])[0])
    assert before.best is None
    half = dict(list(images_of(measured).items())[:2])
    submitted(measured, published, images_of(measured, 0.4), "Worse")
    submitted(measured, published, half, "Better")
    (after,) = rows_of(read_entries([measured.root])[0])
    assert after.best is not None
    assert after.best.record.name == "Better"
    assert after.leak == after.best.psnr == 90  # half at 160, half as the suite left them
    assert after.best.recovered == 0.5
    assert [known.record.name for known in after.submissions] == ["Better", "Worse"]
    assert after.submissions[1].psnr == 20
    assert after.numbers == before.numbers  # what the suite found stays what it is


def test_the_same_file_enters_once(measured: Run, published: Path) -> None:
    submitted(measured, published, images_of(measured, 0.2), "Somebody")
    enter(measured, published / "mine.safetensors", "Somebody")
    assert len(list(measured.submissions.iterdir())) == 1
    submitted(measured, published, images_of(measured, 0.3), "Somebody")
    assert len(read_records(measured)[0]) == 2


def test_a_submission_to_updates_that_are_gone_counts_no_more(
    measured: Run, published: Path
) -> None:
    submitted(measured, published, images_of(measured, 0.2), "Somebody")
    about = next(iter(measured.observations.glob("round-*/client-*.json")))
    about.unlink()
    records, wrong = read_records(measured)
    assert not records
    assert "of other updates" in wrong[0]


def test_a_record_that_was_edited_is_left_out(measured: Run, published: Path) -> None:
    submitted(measured, published, images_of(measured, 0.2), "Somebody")
    (file,) = measured.submissions.iterdir()
    file.write_text(file.read_text().replace("Somebody", "<b>me</b>"))
    (measured.submissions / "mine.json").write_text('{"name": "<script>"}')
    records, wrong = read_records(measured)
    assert not records
    assert len(wrong) == 2


def test_scores_of_updates_that_a_record_does_not_name_count_for_nothing(
    measured: Run, published: Path
) -> None:
    submitted(measured, published, images_of(measured, 0.2), "Somebody")
    (file,) = measured.submissions.iterdir()
    told = read_json(file)
    first = next(iter(told["observations"]))
    for change in ({}, {first: told["observations"][first]}, {"../../x": "0"}):
        write_json(file, {**told, "observations": change})
        assert read_records(measured)[0] == []


def test_a_run_that_is_not_concluded_takes_no_submission(measured: Run, published: Path) -> None:
    measured.summary_path.unlink()
    with pytest.raises(RunError, match="is not concluded"):
        submitted(measured, published, images_of(measured), "Somebody")


def test_a_refused_submission_leaves_nothing(measured: Run, published: Path) -> None:
    for name, link in (("<b>", "https://a.org"), ("me", "javascript:alert(1)")):
        with pytest.raises(RunError):
            enter(measured, published / "mine.safetensors", name, link)
    assert not measured.submissions.exists()

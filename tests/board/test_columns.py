"""The table: every number of a row, and nothing of a picture."""

from __future__ import annotations

import pandas as pd

from fedsim.board.columns import COLUMNS, table_line
from fedsim.board.page import Built
from fedsim.core.run import Run


def test_the_table_has_a_line_for_each_row_and_every_number_as_it_is(built: Built) -> None:
    table = pd.read_csv(built.table)
    assert len(table) == len(built.rows) == 6
    wanted = {
        *("federation", "model", "data", "batch_size", "protocol", "threat", "defense", "strength"),
        *("suite", "pictures", "victims", "runs", "psnr", "psnr_low", "psnr_high", "psnr_client"),
        *("psnr_picture", "ssim", "lpips", "recovered", "identified", "labels", "membership"),
        *("membership_low", "membership_high", "picked_psnr", "picked_ssim", "picked_lpips"),
        *("picked_identified", "worst_by", "picked", "best_known_psnr", "best_known_ssim"),
        *("best_known_recovered", "best_known_by", "best_known_link", "submissions", "accuracy"),
        *("accuracy_kept", "upload_bytes", "epsilon", "flags", "dominated", "fedsim", "specs"),
    }
    assert set(table.columns) == wanted
    plain = table[(table["defense"] == "none") & (table["threat"] == "C")].iloc[0]
    assert (plain["psnr"], plain["recovered"], plain["accuracy_kept"]) == (160, 1, 1)
    assert plain["membership"] == 0.7
    assert "commit" in plain["fedsim"]


def test_nothing_of_a_picture_is_in_the_table(built: Built, shelf: dict[str, Run]) -> None:
    text = built.table.read_text()
    for run in shelf.values():
        assert str(run.root) not in text
        assert not any(digest in text for digest in run.scores["digest"])


def test_every_column_says_something_of_every_row(built: Built) -> None:
    for row in built.rows:
        assert table_line(row)["pictures"] == 2
        assert all(column.shown(row) for column in COLUMNS)
        assert all(column.hint and column.title for column in COLUMNS)

"""Pictures of a row: the client's, the worst case, and what would have been picked."""

from __future__ import annotations

import base64
import io
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from fedsim.board.entries import read_entries
from fedsim.board.page import Built
from fedsim.board.pictures import PIXEL_BUDGET, SIDE, _small, fair_share, triples_of
from fedsim.board.rows import rows_of
from fedsim.core.run import Run


def shown(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


def test_each_picture_is_beside_its_worst_case_and_what_was_picked(built: Built) -> None:
    plain = next(row for row in built.rows if row.defense == "none")
    triples, why = triples_of(plain)
    assert why is None
    assert len(triples) == plain.pictures == 2
    for one in triples:
        assert one.original == one.worst  # an exact copy
        assert one.picked not in (None, one.original)
        assert one.worst_words == "close, 160 dB (exact)"
        assert one.picked_words.startswith("far, ")


def test_large_pictures_are_reduced_and_small_ones_stay() -> None:
    coin = torch.Generator().manual_seed(0)
    assert shown(_small(torch.rand(3, 224, 224, generator=coin))).size == (SIDE, SIDE)
    assert shown(_small(torch.rand(3, 32, 32, generator=coin))).size == (32, 32)


def test_a_board_of_many_rows_shows_fewer_pictures_of_each(built: Built) -> None:
    side = built.rows[0].entries[0].spec.data.image_size
    assert fair_share(built.rows[:1] * 1000) == PIXEL_BUDGET // (3000 * side**2)
    assert len(triples_of(built.rows[0], 1)[0]) == 1


def test_without_the_key_of_the_vault_the_row_says_why(
    shelf: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(shelf["plain"].root, tmp_path / "run")
    monkeypatch.setenv("FEDSIM_VAULT_KEYS", str(tmp_path / "elsewhere"))
    (row,) = rows_of(read_entries([tmp_path / "run"])[0])
    triples, why = triples_of(row)
    assert not triples
    assert why is not None
    assert "its key is not here" in why

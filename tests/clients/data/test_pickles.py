"""Pickled data sets: read as dictionaries of arrays, or one sentence."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from fedsim.clients.data.pickles import read_pickle
from fedsim.core.errors import DataError


def test_keys_become_text_and_arrays_stay_what_they_are(tmp_path: Path) -> None:
    pixels = np.arange(6, dtype=np.uint8).reshape(2, 3)
    content = {b"data": pixels, b"labels": [1, 2], "name": b"batch"}
    (tmp_path / "batch").write_bytes(pickle.dumps(content, 2))
    found = read_pickle(tmp_path / "batch", "CIFAR")
    assert found.keys() == {"data", "labels", "name"}
    assert np.array_equal(found["data"].values, pixels)
    assert found["labels"] == [1, 2]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is missing; get CIFAR's python version anew"),
        (pickle.dumps([1, 2]), "is not a CIFAR batch"),
        (b"\x80\x02}q", "is damaged"),
        (pickle.dumps({"run": os.getcwd}), "asks to load 'posix.getcwd'.*do not trust this file"),
    ],
)
def test_any_other_file_is_one_sentence(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "batch"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        read_pickle(file, "CIFAR")
    assert str(file) in str(caught.value)

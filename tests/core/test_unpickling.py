"""Pickles of arrays, read without running anything."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from fedsim.core.unpickling import Refused, load_arrays
from fedsim.core.weights import read_package
from tests.core.conftest import ALEX, archive


def test_a_pickle_that_asks_for_more_than_arrays_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    with pytest.raises(Refused, match="system"):
        read_package(archive(tmp_path / "p.tar.gz", {ALEX.root: Evil()}), ALEX)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(Refused, match="array of"):
        load_arrays(pickle.dumps(np.array(["text"]), protocol=3))


def test_a_pickle_that_announces_billions_of_values_takes_no_room() -> None:
    content = b"\x80\x02K\x01r\xff\xff\xff\x7f."  # one number, kept under the last of two billion
    tracemalloc.start()
    assert load_arrays(content) == 1
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20

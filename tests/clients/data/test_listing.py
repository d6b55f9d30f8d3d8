"""Listings of trees: compact, and back as they were."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from fedsim.clients.data.listing import Listing, Names, keep_listing, mark_of, recall_listing


def test_names_are_kept_compactly_and_come_back_as_they_were() -> None:
    names = ["a/1.jpg", "ä/ö.jpg", "a/\udcff.jpg", ""]
    kept = Names.of(names)
    assert list(kept) == names
    assert list(kept.take(np.array([2, 0]))) == [names[2], names[0]]
    many = Listing.of({f"train/n{i % 1000:08}/n{i % 1000:08}_{i}.JPEG": i for i in range(50_000)})
    assert len(pickle.dumps(many)) < 50_000 * 80
    assert len(many.folders) == 1000
    assert many.folders[many.folder_of[77]] == many.names[77].rpartition("/")[0]


def test_a_listing_that_was_kept_comes_back_with_its_directories(tmp_path: Path) -> None:
    marks = {name: mark_of(name, "1") for name in ("b/2.jpg", "a/1.jpg", "top.jpg")}
    listing = Listing.of(marks)
    file = tmp_path / "listing.npz"
    keep_listing(file, listing, {"a": "17", "b": "18"})
    found = recall_listing(file)
    assert found is not None
    assert list(found[0].names) == ["a/1.jpg", "b/2.jpg", "top.jpg"]
    assert found[0].marks.tolist() == [marks[name] for name in found[0].names]
    assert found[0].folders == listing.folders
    assert found[1] == {"a": "17", "b": "18"}


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 half of a zip"])
def test_a_spoilt_listing_is_none(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "listing.npz"
    if content is not None:
        file.write_bytes(content)
    assert recall_listing(file) is None


def test_another_name_or_stamp_is_another_mark() -> None:
    assert mark_of("a", "1") == mark_of("a", "1")
    assert len({mark_of(name, stamp) for name in "ab" for stamp in "12"}) == 4

"""The cache: one folder, whole files, and work done again where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.core.cache import cache_file, cache_folder, keep, keep_lines, weights_folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSIM_WEIGHTS")
    return tmp_path / "cache"


def test_it_is_where_the_environment_says_and_weights_are_in_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_folder() == folder
    assert weights_folder() == folder / "weights"
    monkeypatch.setenv("FEDSIM_WEIGHTS", "/elsewhere")
    assert weights_folder() == Path("/elsewhere")


def test_any_key_has_a_file_of_its_own() -> None:
    keys = ["a", "b", "a/../b", "x" * 10_000, "\udcff"]
    files = [cache_file("kind", key, ".json") for key in keys]
    assert len(set(files)) == len(keys)
    assert {file.parent for file in files} == {cache_folder()}
    assert all(len(file.name) < 100 for file in files)


def test_what_is_kept_replaces_what_was_and_leaves_nothing_beside_it(folder: Path) -> None:
    for content in (b"one", b"another"):
        keep(folder / "file", content)
    assert (folder / "file").read_bytes() == b"another"
    assert [file.name for file in folder.iterdir()] == ["file"]


def test_lines_are_added_at_the_end(folder: Path) -> None:
    keep_lines(folder / "lines", ["a", "b"])
    keep_lines(folder / "lines", ["c"])
    assert (folder / "lines").read_text() == "a\nb\nc\n"


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "in the way").write_text("")
    keep(tmp_path / "in the way" / "file", b"content")
    keep_lines(tmp_path / "in the way" / "lines", ["a"])
    assert [path.name for path in tmp_path.iterdir()] == ["in the way"]

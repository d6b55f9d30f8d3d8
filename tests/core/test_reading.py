"""Reading: plain files alone, of a size that fits, and what is wrong with others in words."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from fedsim.core.errors import DamagedError
from fedsim.core.files import read_json, read_tensors, save_tensors, write_json
from fedsim.core.reading import MOST_JSON, opened, read_file


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert read_file(tmp_path / "file") == b"content"
    with opened(tmp_path / "file") as file:
        assert file.read(4) == b"cont"
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "absent")


def test_a_link_is_followed_only_where_the_user_named_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="it is a link"):
        read_file(tmp_path / "link")
    assert read_file(tmp_path / "link", links=True) == b"content"


def test_a_folder_above_a_file_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    assert read_file(tmp_path / "link" / "file") == b"content"


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with pytest.raises(OSError, match="it is too large"):
        read_file(tmp_path / "file", most=6)
    assert read_file(tmp_path / "file", most=7) == b"content"
    assert read_file(tmp_path / "file", most=None) == b"content"


def odd(kind: str, path: Path) -> None:
    """Something that is no file of ours."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(MOST_JSON + 1)
    else:
        path.symlink_to({"device": "/dev/zero", "loop": path}[kind])


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device", "loop", "sparse"])
@pytest.mark.parametrize("links", [False, True])
def test_what_is_no_file_is_damage_in_one_sentence_and_at_once(
    kind: str, links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    odd(kind, Path("odd"))
    for read in (read_json, read_tensors):
        with pytest.raises(DamagedError, match=r"^'odd' is damaged.*\.$"):
            read(Path("odd"), links=links)


def test_json_and_tensors_are_read_through_no_link_of_a_run(tmp_path: Path) -> None:
    write_json(tmp_path / "j", {})
    save_tensors(tmp_path / "t", {})
    for name in ("j", "t"):
        (tmp_path / f"{name}-link").symlink_to(tmp_path / name)
    with pytest.raises(DamagedError, match="it is a link"):
        read_json(tmp_path / "j-link")
    with pytest.raises(DamagedError, match="it is a link"):
        read_tensors(tmp_path / "t-link")
    assert read_json(tmp_path / "j-link", links=True) == {}
    assert read_tensors(tmp_path / "t-link", links=True) == ({}, {})

"""Files: whole or not at all, and damage is told from content."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from fedsim.core.errors import DamagedError
from fedsim.core.files import (
    checksum,
    read_json,
    read_tensors,
    save_tensors,
    write_atomically,
    write_json,
)

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2])}


def test_a_file_is_replaced_as_a_whole_with_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "below" / "file"
    for content in (b"one", b"another"):
        write_atomically(file, content, 0o600)
    assert file.read_bytes() == b"another"
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()  # in the way
    (tmp_path / "file" / "kept").touch()
    with pytest.raises(OSError, match=r"[Dd]irectory"):
        write_atomically(tmp_path / "file", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file" / "kept").is_file()


def test_tensors_come_back_with_their_metadata(tmp_path: Path) -> None:
    save_tensors(tmp_path / "t", TENSORS, {"about": "them"})
    tensors, about = read_tensors(tmp_path / "t")
    assert about == {"about": "them"}
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize("at", [-1, -20, 60, 100])
def test_a_bit_that_is_flipped_anywhere_is_damage(tmp_path: Path, at: int) -> None:
    save_tensors(tmp_path / "t", TENSORS, {"about": "them"})
    content = bytearray((tmp_path / "t").read_bytes())
    content[at] ^= 1
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(DamagedError, match="is damaged"):
        read_tensors(tmp_path / "t")


def test_a_file_of_others_without_a_seal_is_taken_as_it_is(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "t", {"by": "others"})
    tensors, about = read_tensors(tmp_path / "t")
    assert torch.equal(tensors["a"], TENSORS["a"])
    assert about == {"by": "others"}


def test_a_missing_file_is_missing_and_not_damaged(tmp_path: Path) -> None:
    for read in (read_tensors, read_json):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_is_damaged(tmp_path: Path, content: bytes) -> None:
    write_json(tmp_path / "j", {"a": [1, None]})
    assert read_json(tmp_path / "j") == {"a": [1, None]}
    (tmp_path / "j").write_bytes(content)
    with pytest.raises(DamagedError, match="not JSON"):
        read_json(tmp_path / "j")


def test_a_full_disk_looks_like_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: dict, filename: Path, metadata: dict) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("fedsim.core.files.save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        save_tensors(tmp_path / "t", TENSORS)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_checksum_is_of_names_and_numbers_and_not_of_their_order() -> None:
    first = checksum(TENSORS)
    assert first == checksum(dict(reversed(TENSORS.items())))
    assert first != checksum({"a": TENSORS["a"], "c": TENSORS["b"]})
    assert first != checksum({**TENSORS, "b": torch.tensor([2, 1])})


def test_tensors_are_read_back_from_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"run-\xff") / "x.safetensors"
    save_tensors(path, {"a": torch.arange(3)}, {"about": "words"})
    tensors, about = read_tensors(path)
    assert tensors["a"].tolist() == [0, 1, 2]
    assert about == {"about": "words"}
    with pytest.raises(FileNotFoundError):
        read_tensors(path.with_name("absent"))

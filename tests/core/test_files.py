"""Files: whole or not at all, and damage is told from content."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save, save_file

from fedsim.core import files
from fedsim.core.errors import DamagedError
from fedsim.core.files import (
    LINE_END,
    checksum,
    json_line,
    parse_json,
    read_json,
    read_tensors,
    save_tensors,
    tensors_from_bytes,
    tensors_to_bytes,
    write_atomically,
    write_json,
)
from tests.planted import flip

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


def test_in_memory_tensors_are_what_they_are_in_a_file(tmp_path: Path) -> None:
    save_tensors(tmp_path / "t", TENSORS, {"about": "them"})
    content = tensors_to_bytes(TENSORS, {"about": "them"})
    assert content == (tmp_path / "t").read_bytes()
    tensors, about = tensors_from_bytes(content, tmp_path / "t")
    assert about == {"about": "them"}
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    bare, about = tensors_from_bytes(save(TENSORS), tmp_path / "bare")
    assert bare.keys() == TENSORS.keys()
    assert about == {}
    for at in (0, 8, 60, 100, -20, -1):
        damaged = bytearray(content)
        damaged[at] ^= 1
        with pytest.raises(DamagedError, match="is damaged"):
            tensors_from_bytes(bytes(damaged), tmp_path / "t")
    for cut in (b"", content[:4], content[:-1]):
        with pytest.raises(DamagedError, match="is damaged"):
            tensors_from_bytes(cut, tmp_path / "t")


JSON = {"kind": "delta", "loss": 1.5e-07, "words": "ä, \u2028", "none": None, "list": [1, 2]}


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (lambda path: save_tensors(path, TENSORS, {"about": "them"}), read_tensors),
        (lambda path: save_tensors(path, TENSORS), read_tensors),
        (lambda path: write_json(path, JSON), read_json),
        (lambda path: write_json(path, {}), read_json),
        (
            lambda path: path.write_bytes(json_line(JSON)),
            lambda path: parse_json(path.read_bytes(), "a line", LINE_END),
        ),
    ],
    ids=["tensors", "tensors alone", "json", "empty json", "line"],
)
def test_a_bit_that_is_flipped_anywhere_is_damage(
    write: Callable[[Path], None], read: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    write(path)
    read(path)
    for at in range(path.stat().st_size):
        flip(path, at, at % 8)
        with pytest.raises(DamagedError, match="is damaged"):
            read(path)
        flip(path, at, at % 8)


def test_what_comes_after_a_sealed_mapping_is_damage(tmp_path: Path) -> None:
    write_json(tmp_path / "j", JSON)
    whole = (tmp_path / "j").read_bytes()
    for content in (whole + b"\n", whole[:-1], whole + b" " * 200):
        (tmp_path / "j").write_bytes(content)
        with pytest.raises(DamagedError, match="its seal is broken"):
            read_json(tmp_path / "j")


def test_json_of_others_without_a_seal_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "j").write_text(json.dumps(JSON))
    assert read_json(tmp_path / "j") == JSON
    write_json(tmp_path / "j", [1, 2])  # a list has no room for one
    assert (tmp_path / "j").read_text() == "[\n  1,\n  2\n]\n"
    assert read_json(tmp_path / "j") == [1, 2]


def test_to_others_a_seal_is_one_more_key(tmp_path: Path) -> None:
    write_json(tmp_path / "j", JSON)
    seen = json.loads((tmp_path / "j").read_text())
    assert {key: value for key, value in seen.items() if key != "seal"} == JSON
    assert read_json(tmp_path / "j") == JSON
    assert json.loads(json_line(JSON)) == JSON | {"seal": json.loads(json_line(JSON))["seal"]}


@pytest.mark.parametrize(
    "write", [lambda p: write_json(p, JSON), lambda p: save_tensors(p, TENSORS)]
)
def test_a_file_is_on_the_disk_before_its_name_is_and_that_before_the_next_file(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(handle: int) -> None:
        done.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def noted_replace(path: Path, target: Path) -> Path:
        assert path.stat().st_size > 0
        done.append(("rename", str(path)))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    write(tmp_path / "new" / "below" / "file")
    assert done[:2] == [("sync", str(tmp_path)), ("sync", str(tmp_path / "new"))]
    (one, file), (two, renamed), three = done[2:]
    assert (one, two, three) == ("sync", "rename", ("sync", str(tmp_path / "new" / "below")))
    assert file == renamed


def test_a_disk_that_fails_at_the_last_moment_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "j", JSON)

    def failing(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output"):
        write_json(tmp_path / "j", {})
    assert read_json(tmp_path / "j") == JSON
    assert [path.name for path in tmp_path.iterdir()] == ["j"]

    def unknown(handle: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", unknown)  # a file system that cannot
    write_json(tmp_path / "j", {})
    assert files.read_json(tmp_path / "j") == {}


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

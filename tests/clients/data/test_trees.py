"""Large trees: listed once, looked at instead of decoded."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from PIL import Image

from fedsim.clients.data import broken, folders, trees
from fedsim.core.cache import cache_folder
from fedsim.core.errors import DataError
from tests.layouts import load, names_of, save_picture

CLASSES = ("bird", "cat")
EACH = 6


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten pictures are many here, and a folder has settled at once."""
    for module in (broken, folders, trees):
        monkeypatch.setattr(module, "LARGE", 10)
    monkeypatch.setattr(trees, "SETTLED", -60.0)
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for split in ("train", "test"):
        for c, name in enumerate(CLASSES):
            for i in range(EACH):
                save_picture(tmp_path / "tree" / split / name / f"{i}.jpg", 10 * c + i, side=64)
    return tmp_path / "tree"


def _forbid(monkeypatch: pytest.MonkeyPatch, module: object, name: str, words: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError(words)

    monkeypatch.setattr(module, name, fail)


def _scramble(file: Path) -> None:
    """Its size can be read and its end is there: only the tables in between are not."""
    file.write_bytes(file.read_bytes().replace(b"\xff\xdb", b"\xff\xfe"))


def _names_read(monkeypatch: pytest.MonkeyPatch, method: str) -> list[str]:
    """The pictures whose files are opened, or read as a whole, from here on."""
    names: list[str] = []
    plain = getattr(trees.FolderTree, method)

    def noted(self: trees.FolderTree, name: str) -> object:
        names.append(name)
        return plain(self, name)

    monkeypatch.setattr(trees.FolderTree, method, noted)
    return names


def test_a_large_tree_is_the_same_data_set_as_a_small_one(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = load("imagefolder", tree)
    assert {file.name.split("-")[0] for file in cache_folder().iterdir()} == {
        "listing",
        "checked",
    }
    for module in (broken, folders, trees):
        monkeypatch.setattr(module, "LARGE", 1_000)
    small = load("imagefolder", tree)
    assert names_of(large) == names_of(small)
    assert large.classes == small.classes
    assert np.array_equal(large.labels, small.labels)
    assert np.array_equal(pickle.loads(pickle.dumps(large)).image(3), small.image(3))


def test_a_large_tree_is_neither_decoded_nor_walked_again(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _forbid(monkeypatch, broken, "decode", "decoded")
    first = load("imagefolder", tree)
    scanned, plain = list[Path](), os.scandir

    def scandir(path: str) -> Iterator[os.DirEntry[str]]:
        scanned.append(Path(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", scandir)
    _forbid(monkeypatch, trees.FolderTree, "open", "opened again")
    again, test = load("imagefolder", tree), load("imagefolder", tree, "test")
    assert names_of(again) == names_of(first)
    assert len(test) == 2 * EACH
    assert set(scanned) <= {tree}  # where there might be zips; nothing below


@pytest.mark.parametrize("deep", [False, True])
def test_a_new_file_is_found_and_only_it_is_looked_at(
    tree: Path, monkeypatch: pytest.MonkeyPatch, deep: bool
) -> None:
    load("imagefolder", tree)
    new = save_picture(tree / "train" / "cat" / ("kittens/new.jpg" if deep else "new.jpg"), 99)
    looked = _names_read(monkeypatch, "open")
    assert len(load("imagefolder", tree)) == 2 * EACH + 1
    assert looked == [str(new.relative_to(tree))]
    new.unlink()
    assert len(load("imagefolder", tree)) == 2 * EACH


def test_a_check_that_was_interrupted_goes_on_where_it_was(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broken, "BLOCK", 8)
    (tree / "test" / "bird" / "0.jpg").write_bytes(b"")
    looked, plain = list[str](), trees.FolderTree.open

    def interrupted(self: trees.FolderTree, name: str) -> BinaryIO:
        looked.append(name)
        if looked.count("train/bird/0.jpg") == 1 and name == "train/bird/0.jpg":
            raise KeyboardInterrupt
        return plain(self, name)

    monkeypatch.setattr(trees.FolderTree, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load("imagefolder", tree)
    assert load("imagefolder", tree, "test").skipped == ("test/bird/0.jpg",)
    assert looked.count("test/bird/0.jpg") == 1  # in the first block, which was done
    assert set(looked) >= {f"train/cat/{i}.jpg" for i in range(EACH)}


def test_a_listing_made_while_a_folder_changes_is_not_kept(
    tree: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "SETTLED", 60.0)
    load("imagefolder", tree)
    assert [file.name.split("-")[0] for file in cache.iterdir()] == ["checked"]


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "bmp"])
def test_cut_and_empty_files_are_found_without_decoding_the_others(
    tree: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for i in range(3):
        save_picture(tree / "train" / "dog" / f"{i}.{kind}", i, side=64)
    cut, empty = tree / "train" / "dog" / f"0.{kind}", tree / "train" / "dog" / f"1.{kind}"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    empty.write_bytes(b"")
    asked = _names_read(monkeypatch, "read")
    for _ in range(2):
        images = load("imagefolder", tree)
        assert images.skipped == (f"train/dog/0.{kind}", f"train/dog/1.{kind}")
        assert len(images) == 2 * EACH + 1
    doubted = {f"train/dog/{i}.{kind}" for i in range(3 if kind == "bmp" else 2)}
    assert len(asked) == len(doubted)  # once, though the tree was loaded twice
    assert set(asked) == doubted


def test_an_unusual_end_is_no_damage(tree: Path) -> None:
    file = tree / "train" / "cat" / "0.jpg"
    file.write_bytes(file.read_bytes() + b"\0" * 5_000)
    assert load("imagefolder", tree).skipped == ()


def test_what_only_decoding_finds_is_told_and_left_out_afterwards(tree: Path) -> None:
    _scramble(tree / "train" / "bird" / "2.jpg")
    images = load("imagefolder", tree)
    assert images.skipped == ()
    with pytest.raises(DataError, match=r"bird/2\.jpg .* looked whole and cannot be decoded"):
        images.image(2)
    for _ in range(2):
        again = load("imagefolder", tree)
        assert again.skipped == ("train/bird/2.jpg",)
        assert len(again) == 2 * EACH - 1
        again.image(2)


def test_a_picture_that_was_put_right_in_place_is_back(tree: Path, tmp_path: Path) -> None:
    file = tree / "train" / "bird" / "2.jpg"
    shutil.copy2(file, tmp_path / "backup.jpg")
    images = load("imagefolder", tree)
    _scramble(file)  # in place: the folder does not change
    os.utime(file, (1, 1))
    with pytest.raises(DataError, match=r"bird/2\.jpg"):
        images.image(2)
    assert load("imagefolder", tree).skipped == ("train/bird/2.jpg",)
    file.write_bytes((tmp_path / "backup.jpg").read_bytes())
    shutil.copystat(tmp_path / "backup.jpg", file)  # to the very file that was listed
    assert load("imagefolder", tree).skipped == ()


def test_a_file_that_cannot_be_read_for_now_is_not_taken_for_damaged(tree: Path) -> None:
    images = load("imagefolder", tree)
    file = tree / "train" / "bird" / "2.jpg"
    file.rename(tree / "aside")
    with pytest.raises(DataError, match=r"bird/2\.jpg"):
        images.image(2)
    (tree / "aside").rename(file)
    assert load("imagefolder", tree).skipped == ()


def test_spoilt_caches_are_made_again(tree: Path, cache: Path) -> None:
    before = names_of(load("imagefolder", tree))
    for file in cache.iterdir():
        file.write_bytes(b"spoilt")
    assert names_of(load("imagefolder", tree)) == before
    (cache / "damaged-none.txt").write_text("")
    for file in cache.iterdir():
        file.write_bytes(file.read_bytes()[:-50])
    assert names_of(load("imagefolder", tree)) == before


def test_without_a_cache_a_large_tree_is_looked_at_each_time(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "file"))
    (tree / "train" / "cat" / "1.jpg").write_bytes(b"")
    assert load("imagefolder", tree).skipped == ("train/cat/1.jpg",)


def zipped(path: Path, kind: int = zipfile.ZIP_DEFLATED, **members: bytes) -> Path:
    """A zip of two whole pictures in each of two classes, and of these members."""
    stream = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(stream, "PNG")
    with zipfile.ZipFile(path, "w", kind) as archive:
        for number in range(4):
            archive.writestr(f"{CLASSES[number % 2]}/{number}.png", stream.getvalue())
        for name, content in members.items():
            archive.writestr(f"bird/{name}.bmp", content)
    return path


def test_a_member_of_a_zip_that_would_fill_the_memory_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(trees, "SMALL", 1 << 16)
    random = np.random.default_rng(0).bytes((1 << 20) + 1)
    path = zipped(tmp_path / "z.zip", large=random, dense=bytes(1 << 18), small=bytes(1 << 12))
    tree = trees.open_tree(str(path))
    tree.listing()
    for name, words in (("large", "more than any picture"), ("dense", "100 times as large")):
        with pytest.raises(OSError, match=words):
            tree.read(f"bird/{name}.bmp")
    assert tree.read("bird/small.bmp") == bytes(1 << 12)
    images = load("imagefolder", path)
    assert "bird/large.bmp" in images.skipped + load("imagefolder", path, "test").skipped


def test_a_member_that_is_more_than_it_says_is_not_unpacked_to_its_end(tmp_path: Path) -> None:
    size = 64 << 20
    path = zipped(tmp_path / "z.zip", liar=bytes(size))
    content = bytearray(path.read_bytes())
    told, small = size.to_bytes(4, "little"), (1000).to_bytes(4, "little")
    assert content.count(told) == 2  # before the member, and in the directory
    path.write_bytes(content.replace(told, small))
    tree = trees.open_tree(str(path))
    tree.listing()
    tracemalloc.start()
    with pytest.raises((OSError, zipfile.BadZipFile)):
        tree.read("bird/liar.bmp")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 << 20


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_packed_in_an_unbounded_way_is_not_unpacked(tmp_path: Path, kind: int) -> None:
    tree = trees.open_tree(str(zipped(tmp_path / "z.zip", kind)))
    tree.listing()
    with pytest.raises(OSError, match="another way than stored or deflated"):
        tree.read("bird/0.png")


def test_a_file_too_large_for_a_picture_is_not_read(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "MOST_BYTES", 100_000)
    with open(tree / "train" / "bird" / "0.jpg", "wb") as file:
        file.truncate(1 << 34)  # a file of holes
    with pytest.raises(OSError, match="more than any picture"):
        trees.open_tree(str(tree)).read("train/bird/0.jpg")
    assert load("imagefolder", tree).skipped == ("train/bird/0.jpg",)


def test_a_zip_whose_names_are_no_text_is_one_sentence(tmp_path: Path) -> None:
    path = zipped(tmp_path / "z.zip", **{"ü": b"x"})
    path.write_bytes(path.read_bytes().replace("ü".encode(), b"\xff\xff"))
    with pytest.raises(DataError, match="cannot be read as a zip"):
        load("imagefolder", path)


def test_names_that_are_no_utf8_are_names_like_others(tree: Path) -> None:
    (tree / "train" / "bird").rename(tree / "train" / os.fsdecode(b"b\xefrd"))
    odd = os.fsencode(tree / "train" / "cat") + b"/\xff\xe9.jpg"
    shutil.copy(tree / "train" / "cat" / "0.jpg", odd)
    broken = os.fsencode(tree / "train" / "cat") + b"/[\xfe].jpg"
    Path(os.fsdecode(broken)).write_bytes(b"")
    images = load("imagefolder", tree)
    assert len(images) == 2 * EACH + 1
    assert [os.fsencode(name) for name in images.skipped] == [b"train/cat/[\xfe].jpg"]
    assert all(images.image(index).shape == (3, 16, 16) for index in range(len(images)))
    assert images.classes == ("bird", r"b\xefrd", "cat")  # also where they are written down

"""CIFAR as it is found: official pickles, trees, zips; no pickle runs anything."""

from __future__ import annotations

import os
import pickle
import zipfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedsim.clients.data.cifar import CLASSES as CIFAR_CLASSES
from fedsim.clients.data.datasets import ImageSet
from fedsim.core.errors import DataError
from tests.clients.data.conftest import SHARED, photo_tree, truncate
from tests.layouts import load, save_picture


def _zip_folder(folder: Path, target: Path, under: str = "") -> Path:
    with zipfile.ZipFile(target, "w") as archive:
        for file in sorted(folder.rglob("*.jpg")):
            archive.write(file, under + file.relative_to(folder).as_posix())
    return target


def _write_batches(folder: Path, each: int = 4, protocol: int = 2) -> np.ndarray:
    """The official layout; returns the pixels of all train batches."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    pixels = []
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        data = rng.integers(0, 256, (each, 3072), dtype=np.uint8)
        batch = {
            b"batch_label": name.encode(),
            b"labels": [int(label) for label in rng.integers(0, 10, each)],
            b"data": data,
            b"filenames": [b"x.png"] * each,
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol))
        pixels.append(data)
    meta = {b"num_cases_per_batch": each, b"label_names": [c.encode() for c in CIFAR_CLASSES]}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol))
    return np.concatenate(pixels[:5])


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("given", ["cifar-10-batches-py", "."])
def test_the_official_batches_give_their_own_pixels(
    tmp_path: Path, given: str, protocol: int
) -> None:
    pixels = _write_batches(tmp_path / "cifar-10-batches-py", protocol=protocol)
    train = load("cifar10", tmp_path / given, image_size=32)
    assert len(train) == 20
    assert len(load("cifar10", tmp_path / given, "test")) == 4
    assert train.classes == CIFAR_CLASSES
    expected = torch.from_numpy(pixels[7].reshape(3, 32, 32)).float() / 255
    assert torch.allclose(train.image(7), expected)
    sent = pickle.dumps(train)
    assert len(sent) < pixels.nbytes / 4
    assert torch.equal(pickle.loads(sent).image(7), train.image(7))


def test_a_batch_stored_column_by_column_is_read_right(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    _write_batches(folder)
    data = np.asfortranarray(np.arange(2 * 3072).reshape(2, 3072) % 251).astype(np.uint8)
    (folder / "test_batch").write_bytes(pickle.dumps({b"data": data, b"labels": [1, 2]}, 2))
    image = load("cifar10", folder, "test", image_size=32).image(1)
    assert torch.allclose(image.flatten() * 255, torch.from_numpy(data[1]).float())


class _Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_batch_that_wants_to_run_something_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    _write_batches(folder)
    mark = tmp_path / "was_here"
    payload = {b"data": _Malicious(mark), b"labels": []}
    (folder / "data_batch_3").write_bytes(pickle.dumps(payload, 2))
    with pytest.raises(DataError, match=r"data_batch_3 asks to load '\w+\.mkdir'.*do not trust"):
        load("cifar10", folder)
    assert not mark.exists()


def test_an_array_of_objects_is_no_batch(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    _write_batches(folder)
    payload = {b"data": np.array([[None] * 3072], dtype=object), b"labels": [0]}
    (folder / "test_batch").write_bytes(pickle.dumps(payload, 2))
    with pytest.raises(DataError, match=r"test_batch asks to load .an array of .*do not trust"):
        load("cifar10", folder, "test")


def test_a_missing_or_garbled_batch_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    _write_batches(folder)
    (folder / "data_batch_2").unlink()
    with pytest.raises(DataError, match="data_batch_2 is missing"):
        load("cifar10", folder)
    truncate(folder / "test_batch")
    with pytest.raises(DataError, match="test_batch is damaged"):
        load("cifar10", folder, "test")


@pytest.fixture
def small_cifar(tmp_path: Path, photo: Image.Image) -> Path:
    root = tmp_path / "cifar_tree"
    photo_tree(root / "train", photo, list(CIFAR_CLASSES), 2)
    photo_tree(root / "test", photo, list(CIFAR_CLASSES), 1)
    return root


def test_a_tree_a_zip_and_two_zips_are_the_same_cifar10(small_cifar: Path, tmp_path: Path) -> None:
    one = _zip_folder(small_cifar, tmp_path / "one.zip")
    wrapped = _zip_folder(small_cifar, tmp_path / "wrapped.zip", "CIFAR-10/")
    two, bare = tmp_path / "two", tmp_path / "bare"
    two.mkdir()
    bare.mkdir()
    for split in ("train", "test"):
        _zip_folder(small_cifar / split, two / f"cifar10_{split}_jpeg.zip", f"{split}/")
        _zip_folder(small_cifar / split, bare / f"cifar10_{split}.zip")
    for split, count in (("train", 20), ("test", 10)):
        expected = load("cifar10", small_cifar, split)
        assert len(expected) == count
        assert expected.classes == CIFAR_CLASSES
        for path in (one, wrapped, two, bare):
            found = load("cifar10", path, split)
            assert found.classes == expected.classes
            assert np.array_equal(found.labels, expected.labels)
            assert torch.equal(found.image(count - 1), expected.image(count - 1))


def test_classes_of_other_names_are_sorted(tmp_path: Path, photo: Image.Image) -> None:
    root = photo_tree(tmp_path / "others", photo, ["truck", "zebra", "airplane"], 3)
    assert load("cifar10", root).classes == ("airplane", "truck", "zebra")


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_same_index_is_the_same_image_in_another_process(
    small_cifar: Path, tmp_path: Path, method: str
) -> None:
    zipped = load("cifar10", _zip_folder(small_cifar, tmp_path / "one.zip"))
    sets = [load("photos"), load("lfw_subset"), zipped]
    here = [images.image(11).numpy() for images in sets]  # so the zip is open when it is sent
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
        there = pool.submit(_images_as_numpy, sets, 11).result()
    assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))


def _images_as_numpy(sets: list[ImageSet], index: int) -> list[np.ndarray]:
    return [images.image(index).numpy() for images in sets]


def test_a_damaged_picture_in_a_zip_is_left_out(small_cifar: Path, tmp_path: Path) -> None:
    truncate(small_cifar / "train" / "cat" / "0001.jpg")
    images = load("cifar10", _zip_folder(small_cifar, tmp_path / "one.zip"))
    assert images.skipped == ("train/cat/0001.jpg",)
    assert len(images) == 19


def test_a_broken_zip_is_told(small_cifar: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    truncate(_zip_folder(small_cifar, folder / "train.zip"))
    with pytest.raises(DataError, match="cannot be read as a zip"):
        load("cifar10", folder)


def test_the_real_cifar10_zip_is_whole() -> None:
    archive = SHARED / "cifar10" / "cifar10_test_jpeg.zip"
    if not archive.is_file():
        pytest.skip("the shared CIFAR-10 zips are not here")
    images = load("cifar10", archive, image_size=32)  # it holds test/ only, which is divided
    assert 7_800 < len(images) < 8_200
    assert images.classes == CIFAR_CLASSES
    assert images.skipped == ()
    assert images.image(0).shape == (3, 32, 32)


def _cifar100(folder: Path) -> np.ndarray:
    folder.mkdir(parents=True)
    coin = np.random.default_rng(0)
    for split, count in (("test", 4), ("train", 8)):
        pixels = coin.integers(0, 256, (count, 3072), dtype=np.uint8)
        batch = {
            b"filenames": [b"x.png"] * count,
            b"fine_labels": [(13 * i) % 100 for i in range(count)],
            b"coarse_labels": [i % 20 for i in range(count)],
            b"data": pixels,
        }
        (folder / split).write_bytes(pickle.dumps(batch, 2))
    names = {
        b"fine_label_names": [f"fine{i:02}".encode() for i in range(100)],
        b"coarse_label_names": [f"coarse{i:02}".encode() for i in range(20)],
    }
    (folder / "meta").write_bytes(pickle.dumps(names, 2))
    return pixels


@pytest.mark.parametrize("given", ["", "cifar-100-python"])
def test_cifar100_has_fine_labels_unless_asked_for_coarse(tmp_path: Path, given: str) -> None:
    pixels = _cifar100(tmp_path / "cifar-100-python")
    fine = load("cifar100", tmp_path / given, image_size=32)
    assert fine.classes == tuple(f"fine{i:02}" for i in range(100))
    assert fine.labels.tolist() == [0, 13, 26, 39, 52, 65, 78, 91]
    expected = torch.from_numpy(pixels[6].reshape(3, 32, 32)).float() / 255
    assert torch.allclose(fine.image(6), expected)
    coarse = load("cifar100", tmp_path / given, "test", label="coarse")
    assert coarse.classes == tuple(f"coarse{i:02}" for i in range(20))
    assert coarse.labels.tolist() == [0, 1, 2, 3]


def test_cifar100_as_a_tree_of_pictures_has_fine_labels_only(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in ("apple", "worm", "bee"):
            save_picture(tmp_path / "tree" / split / name / "1.png", 1)
    assert load("cifar100", tmp_path / "tree").classes == ("apple", "bee", "worm")
    with pytest.raises(DataError, match="a tree of pictures has no coarse labels"):
        load("cifar100", tmp_path / "tree", label="coarse")


def test_cifar100_s_pickles_run_nothing_and_their_damage_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    _cifar100(folder)
    with pytest.raises(DataError, match=r"no label 'fin' \(did you mean 'fine'\?\)"):
        load("cifar100", tmp_path, label="fin")
    (folder / "train").write_bytes(pickle.dumps({b"data": _Malicious(tmp_path / "here")}, 2))
    with pytest.raises(DataError, match=r"asks to load '\w+\.mkdir'.*no CIFAR-100 batch needs"):
        load("cifar100", tmp_path)
    assert not (tmp_path / "here").exists()
    (folder / "train").write_bytes(b"\x80\x02cnumpy\nndarray\n)\x81}X\x04\x00\x00\x00dataq\x00.")
    with pytest.raises(DataError, match="is not a CIFAR-100 batch"):
        load("cifar100", tmp_path)
    # An array that was made without being told anything, in a dictionary as a batch has it.
    hollow = b"\x80\x02}(X\x04\x00\x00\x00datacnumpy\nndarray\n)\x81u."
    (folder / "train").write_bytes(hollow)
    with pytest.raises(DataError, match="is not a CIFAR-100 batch"):
        load("cifar100", tmp_path)
    (folder / "meta").unlink()
    with pytest.raises(DataError, match="meta is missing; get CIFAR-100"):
        load("cifar100", tmp_path, "test")

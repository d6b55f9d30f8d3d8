"""MNIST's idx files and CIFAR-100's pickles, as they are downloaded."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.core.errors import DataError
from tests.layouts import load, save_picture

FILES = {"train": 12, "t10k": 5}


def _write_idx(file: Path, values: np.ndarray, packed: bool = False) -> None:
    head = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    content = head + values.astype(np.uint8).tobytes()
    file.parent.mkdir(parents=True, exist_ok=True)
    if packed:
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(content))
    else:
        file.write_bytes(content)


def _mnist(folder: Path, packed: bool = False) -> dict[str, np.ndarray]:
    pixels = {}
    for stem, count in FILES.items():
        coin = np.random.default_rng(count)
        pixels[stem] = coin.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        _write_idx(folder / f"{stem}-images-idx3-ubyte", pixels[stem], packed)
        _write_idx(folder / f"{stem}-labels-idx1-ubyte", np.arange(count) % 10, packed)
    return pixels


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inner", ["", "MNIST/raw"])
def test_mnist_gives_its_own_pixels_in_three_channels(
    tmp_path: Path, inner: str, packed: bool
) -> None:
    pixels = _mnist(tmp_path / inner, packed)
    train = load("mnist", tmp_path, image_size=28)
    test = load("mnist", tmp_path, "test", image_size=28)
    assert train.classes == tuple("0123456789")
    assert train.labels.tolist() == [*range(10), 0, 1]
    assert test.labels.tolist() == [0, 1, 2, 3, 4]
    expected = torch.from_numpy(pixels["train"][11]).float() / 255
    assert torch.allclose(train.image(11), expected.expand(3, 28, 28))
    assert torch.allclose(test.image(4)[2], torch.from_numpy(pixels["t10k"][4]).float() / 255)
    sent = pickle.dumps(train)
    assert len(sent) < pixels["train"].nbytes / 4
    assert torch.equal(pickle.loads(sent).image(3), train.image(3))


def test_spoilt_idx_files_are_named(tmp_path: Path) -> None:
    _mnist(tmp_path)
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    whole = images.read_bytes()
    images.write_bytes(whole[:-10])
    with pytest.raises(DataError, match="announces 9408 bytes of content but holds 9398"):
        load("mnist", tmp_path)
    images.write_bytes(b"\x89PNG" + whole)
    with pytest.raises(DataError, match="is no idx file of 3 dimensions"):
        load("mnist", tmp_path)
    images.write_bytes(whole)
    _write_idx(labels, np.arange(11))
    with pytest.raises(DataError, match=r"12 pictures but .* 11 labels"):
        load("mnist", tmp_path)
    _write_idx(labels, np.arange(12))
    with pytest.raises(DataError, match="has the label 11, which is no digit"):
        load("mnist", tmp_path)
    labels.unlink()
    with pytest.raises(DataError, match="has no train-labels-idx1-ubyte"):
        load("mnist", tmp_path)
    labels.with_name(f"{labels.name}.gz").write_bytes(gzip.compress(whole)[:40])
    with pytest.raises(DataError, match=r"labels-idx1-ubyte\.gz is damaged"):
        load("mnist", tmp_path)
    with pytest.raises(DataError, match=r"^data\.path is needed for mnist"):
        load("mnist", None)
    with pytest.raises(DataError, match="is no folder"):
        load("mnist", tmp_path / "nowhere")


# CIFAR-100


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


class _Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


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


def test_a_label_is_refused_where_there_is_nothing_to_choose(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.label is 'fine', but photos has one kind of label"):
        load("photos", None, label="fine")

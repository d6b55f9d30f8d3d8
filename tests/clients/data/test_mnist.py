"""MNIST's idx files, as they are downloaded."""

from __future__ import annotations

import gzip
import pickle
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.clients.data import mnist
from fedsim.core.errors import DataError
from tests.layouts import load

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


def test_a_small_file_that_unpacks_to_gigabytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _mnist(tmp_path)
    images = tmp_path / "train-images-idx3-ubyte"
    monkeypatch.setattr(mnist, "MOST_BYTES", 1 << 20)
    assert len(load("mnist", tmp_path)) == 12
    packed = images.with_name(f"{images.name}.gz")
    packed.write_bytes(gzip.compress(images.read_bytes() + bytes(64 << 20)))
    images.unlink()
    tracemalloc.start()
    with pytest.raises(DataError, match="holds more than 1 MB"):
        load("mnist", tmp_path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16 << 20

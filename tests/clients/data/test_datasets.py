"""Data sets by name: what they are to a client, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.clients.data.datasets import dataset_names
from fedsim.core.errors import DataError
from tests.layouts import load


@pytest.mark.parametrize("name", ["photos", "lfw_subset"])
@pytest.mark.parametrize("size", [8, 33])
def test_an_image_has_three_channels_in_the_unit_range_at_any_size(name: str, size: int) -> None:
    images = load(name, image_size=size)
    image = images.image(len(images) - 1)
    assert image.shape == (3, size, size)
    assert image.dtype == torch.float32
    assert image.min() >= 0
    assert image.max() <= 1
    assert image.std() > 0.01
    assert images.labels.dtype == np.int64
    assert images.skipped == ()


def test_an_unknown_name_tells_the_nearest_and_all_known() -> None:
    with pytest.raises(DataError, match=r"did you mean 'photos'.*cifar10, cifar100"):
        load("photo")
    embedded, on_disk = {"lfw_subset", "photos"}, {"imagefolder", "imagenet", "celeba", "mnist"}
    assert {*dataset_names()} == embedded | on_disk | {"cifar10", "cifar100", "hf:<name>"}


def test_a_label_is_refused_where_there_is_nothing_to_choose(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.label is 'fine', but photos has one kind of label"):
        load("photos", None, label="fine")

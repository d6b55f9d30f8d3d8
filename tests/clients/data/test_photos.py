"""The embedded pictures: crops that share no pixel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.clients.data.photos import PICTURES, crop_boxes
from tests.layouts import load


def test_photos_has_the_same_number_of_crops_of_every_picture() -> None:
    train, test = load("photos"), load("photos", split="test")
    assert np.bincount(train.labels).tolist() == [64] * 8
    assert np.bincount(test.labels).tolist() == [16] * 8
    assert train.classes == test.classes == tuple(PICTURES)


@pytest.mark.parametrize("picture", PICTURES)
def test_train_and_test_crops_share_no_pixel(picture: str) -> None:
    for left, top, right, bottom in crop_boxes(picture, "train"):
        assert right - left == bottom - top
        for other in crop_boxes(picture, "test"):
            apart_in_x = right <= other[0] or other[2] <= left
            apart_in_y = bottom <= other[1] or other[3] <= top
            assert apart_in_x or apart_in_y


def test_crops_are_at_least_half_of_the_region_and_differ() -> None:
    boxes = crop_boxes("astronaut", "train")  # 512 x 512: the region is 358 wide
    sides = [right - left for left, _, right, _ in boxes]
    assert min(sides) >= 179
    assert max(sides) <= 358
    assert len(set(boxes)) == len(boxes)


def test_lfw_subset_is_split_by_class_and_grey() -> None:
    train, test = load("lfw_subset"), load("lfw_subset", split="test")
    assert np.bincount(train.labels).tolist() == [80, 80]
    assert np.bincount(test.labels).tolist() == [20, 20]
    assert train.classes == ("face", "not_face")
    image = train.image(3)
    assert torch.equal(image[0], image[1])
    assert torch.equal(image[0], image[2])

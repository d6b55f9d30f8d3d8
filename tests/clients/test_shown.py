"""Shown: what a client's model sees, and the truth that is kept of it."""

from __future__ import annotations

import torch

from fedsim.clients.shown import shown

PICTURES = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([2, 0, 1])
DRAWN = [
    ([7, 4], (PICTURES[:2], LABELS[:2])),
    ([9, 7], (PICTURES[[2, 0]], LABELS[[2, 0]])),
]
CROP = [{"name": "RandomResizedCrop", "scale": [0.2, 0.5]}]


def test_without_augmentation_the_model_sees_the_pictures_and_each_is_kept_once() -> None:
    found = shown(DRAWN, [], 3, secret=5)
    assert torch.equal(found.images, PICTURES)
    assert found.layout == [[0, 1], [2, 0]]
    assert found.originals is None
    assert set(found.of_truth()) == {"images", "labels", "batches"}


def test_every_view_is_a_picture_of_its_own_beside_the_one_it_was_made_from() -> None:
    found = shown(DRAWN, CROP, 3, secret=5)
    assert found.layout == [[0, 1], [2, 3]]
    assert found.origins == (0, 1, 2, 0)
    assert found.labels.tolist() == [2, 0, 1, 2]
    assert found.originals is not None
    assert torch.equal(found.originals, PICTURES)
    assert not torch.equal(found.images[0], found.images[3])  # one picture, two views
    for (images, labels), rows in zip(found.batches, found.layout, strict=True):
        assert torch.equal(images, found.images[rows])
        assert torch.equal(labels, found.labels[rows])


def test_the_coin_is_the_clients_secret() -> None:
    first, again, other = (shown(DRAWN, CROP, 3, secret).images for secret in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_mixed_labels_are_kept_with_the_dominant_class_and_its_picture() -> None:
    found = shown(DRAWN[:1], [{"name": "MixUp", "alpha": 0.4}], 3, secret=5)
    assert found.mixtures is not None
    torch.testing.assert_close(found.mixtures.sum(1), torch.ones(2))
    assert found.labels.tolist() == found.mixtures.argmax(1).tolist()
    assert torch.equal(found.batches[0][1], found.mixtures)
    assert LABELS[list(found.origins)].tolist() == found.labels.tolist()

"""Batches of anybody's loader."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedsim.captures.batches import seen_in

IMAGES, LABELS = torch.rand(2, 3, 4, 4), torch.tensor([1, 0])


@pytest.mark.parametrize(
    "batch",
    [
        (IMAGES, LABELS),
        [IMAGES, LABELS, "more"],
        {"img": IMAGES, "label": LABELS},
        {"image": IMAGES, "label": LABELS.int()},
        {"pixel_values": IMAGES, "labels": LABELS[:, None]},
        {"img": list(IMAGES), "fine_label": LABELS.tolist()},
    ],
)
def test_pairs_and_mappings_have_pictures_and_labels(batch: Any) -> None:
    seen = seen_in(batch)
    assert torch.equal(seen.images, IMAGES)
    assert torch.equal(seen.labels, LABELS)
    assert seen.labels.dtype == torch.long


def test_mixtures_stay_what_they_are() -> None:
    mixed = torch.tensor([[0.7, 0.3], [0.0, 1.0]])
    assert torch.equal(seen_in((IMAGES, mixed)).labels, mixed)


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ("words", "no pair and no mapping"),
        ({"text": 1}, "it has no pictures"),
        ({"img": IMAGES}, "it has no labels"),
        ((torch.rand(2, 5), LABELS), "not \\(B, C, H, W\\)"),
        ((IMAGES, torch.rand(3)), "its labels are of shape"),
    ],
)
def test_anything_else_is_told(batch: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        seen_in(batch)

"""Passage: what each layer read and gave of a picture."""

from __future__ import annotations

import torch
from torch import nn

from fedsim.core.passage import alike, distinct, picture_of, projection_in, watched
from tests.oddities import InPlace, Unfolded


def test_a_layer_is_seen_as_it_was_whatever_is_added_to_it_in_place() -> None:
    model, picture = InPlace().eval(), picture_of(32)
    with watched(model, picture) as calls:
        model(picture)
    projection = projection_in(calls, picture)
    assert projection is not None
    assert torch.equal(projection.tokens, model.patches(picture)[0])


def test_patches_are_seen_where_a_linear_layer_reads_them() -> None:
    model, picture = Unfolded().eval(), picture_of(32, 1)
    with watched(model, picture) as calls:
        model(picture)
    projection = projection_in(calls, picture)
    assert projection is not None
    assert (projection.call.name, projection.grid, projection.patch) == ("cut", (4, 4), (8, 8))


def test_pictures_have_no_number_twice_and_are_two() -> None:
    one, other = picture_of(16), picture_of(16, 1)
    assert len(one.unique()) == one.numel()
    assert not torch.equal(one, other)


def test_what_begins_alike_is_told_apart_in_a_copy() -> None:
    norm = nn.BatchNorm1d(4, affine=False)
    assert len(distinct(norm).running_mean.unique()) == 4
    assert not norm.running_mean.any()


def test_numbers_are_alike_up_to_rounding() -> None:
    one = torch.ones(3)
    assert alike(one, one + 1e-6)
    assert not alike(one, one + 1e-3)
    assert not alike(one, torch.ones(2))

"""The layout of an imprint: codes at a distance, an orthonormal basis, coordinates of one task."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks.manoeuvres.imprinting import (
    DISTANCE,
    Layout,
    codewords,
    imagined_pictures,
    patch_basis,
)
from fedsim.core.errors import AttackError, SpecError


@pytest.mark.parametrize("count", [2, 16, 100, 196, 784])
def test_the_codes_of_two_places_differ_in_four_signs_at_least(count: int) -> None:
    words = torch.tensor(codewords(count))
    apart = (words.shape[1] - words @ words.T) / 2
    apart.fill_diagonal_(DISTANCE)
    assert int(apart.min()) >= DISTANCE
    assert set(words.unique().tolist()) == {-1, 1}


@pytest.mark.parametrize("patch", [(4, 4), (16, 16), (8, 4)])
def test_the_basis_of_patches_is_orthonormal_and_begins_with_the_mean(patch) -> None:
    basis = patch_basis(*patch)
    assert torch.allclose(basis @ basis.T, torch.eye(len(basis), dtype=torch.float64), atol=1e-10)
    assert float(basis[0].std()) < 1e-12


def test_every_coordinate_has_one_task() -> None:
    layout = Layout.fitting(192, (10, 10), (16, 16), rulers=6)
    slices = (layout.signature_at, layout.code_at, layout.rulers_at)
    tasks = [*range(layout.pixels), *(i for s in slices for i in range(s.start, s.stop))]
    tasks += [layout.constant, layout.balance, layout.sink, layout.witness]
    assert tasks == list(range(192))


def test_a_layout_comes_back_from_its_plain_words() -> None:
    layout = Layout.fitting(192, (4, 4), (8, 8), rulers=5, normed=True)
    assert Layout.told(layout.plain()) == layout


def test_a_narrow_model_is_refused_with_the_room_it_lacks() -> None:
    with pytest.raises(SpecError, match="width of 32"):
        Layout.fitting(32, (4, 4), (8, 8), rulers=6)


def test_words_of_another_manoeuvre_are_no_layout() -> None:
    with pytest.raises(AttackError, match="manoeuvre"):
        Layout.told({"target": 3})


def test_imagined_pictures_are_pictures_and_the_same_for_the_same_coin() -> None:
    first, second = (imagined_pictures(2, 32, torch.Generator().manual_seed(1)) for _ in "ab")
    assert torch.equal(first, second)
    assert float(first.min()) >= 0
    assert float(first.max()) <= 1
    steps = first.diff(dim=-1).flatten()  # heavy tails: most neighbours alike, and some edges
    assert float((steps**4).mean() / (steps**2).mean() ** 2) > 6

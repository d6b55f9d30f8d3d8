"""Identification: the own picture is found among others, and another is not."""

from __future__ import annotations

import pytest
import torch

from fedsim.clients.data import pixel_digest
from fedsim.clients.shards import images_of
from fedsim.core.errors import ModelError
from fedsim.core.spec import load_spec
from fedsim.scoring import identification
from fedsim.scoring.identification import FeatureSpace, Gallery, identification_of
from tests.conftest import small_spec


@pytest.fixture(scope="module")
def gallery() -> Gallery:
    found = identification_of(load_spec({}, ["data.image_size=32", "audit.gallery=80"])).gallery
    assert found is not None
    return found


def truths(count: int = 6) -> torch.Tensor:
    images = images_of(small_spec().data, "train")
    return torch.stack([images.image(80 * i) for i in range(count)])


def test_an_exact_copy_is_identified_even_where_the_gallery_holds_it(gallery: Gallery) -> None:
    own = truths()
    assert gallery.identified(gallery.wanted(own), own) == [1] * len(own)
    whole = identification_of(load_spec({}, ["data.image_size=32", "audit.gallery=512"])).gallery
    assert whole is not None
    assert len(whole) == 512  # every training picture, the victims' among them
    assert whole.identified(whole.wanted(own), own) == [1] * len(own)


def test_another_picture_is_not_identified(gallery: Gallery) -> None:
    own = truths()
    assert gallery.identified(gallery.wanted(own), own.roll(1, 0)) == [0] * len(own)
    flat = torch.full_like(own, 0.5)
    assert sum(gallery.identified(gallery.wanted(own), flat)) <= 1


def test_the_victims_other_pictures_are_no_candidates() -> None:
    own = truths()
    space = FeatureSpace(None)
    digests = tuple(pixel_digest(picture) for picture in own[1:])
    held = Gallery(space, space(own[1:]), digests)
    swapped = own[[1, 0, 2]]
    assert held.identified(held.wanted(own[:3]), own[:3]) == [1, 1, 1]
    assert held.identified(held.wanted(own[:1]), swapped[:1]) == [0]  # another's, in the gallery
    noisy = (0.9 * own[:1] + 0.1 * own[1:2]).expand(2, -1, -1, -1)
    assert held.identified(held.wanted(own[:2]), noisy)[0] == 1


def test_a_good_reconstruction_is_identified(gallery: Gallery) -> None:
    own = truths()
    noisy = own + 0.02 * torch.randn(own.shape, generator=torch.Generator().manual_seed(0))
    assert (
        sum(gallery.identified(gallery.wanted(own), noisy.clamp(0, 1))) >= 4
    )  # chance: 1 in 81 each


def test_without_the_prior_network_pixels_are_the_named_fallback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(spec: object) -> None:
        raise ModelError("not installed.")

    monkeypatch.setattr(identification, "load_prior", missing)
    space = identification.feature_space()
    assert space.name == "pixels"
    own = truths()
    small = Gallery(space, space(own[1:]), tuple("abcde"))
    assert small.identified(small.wanted(own[:1]), own[:1]) == [1]
    assert small.identified(small.wanted(own[:1]), own[1:2]) == [0]
    assert identification.feature_space("pixels").name == "pixels"


def test_features_are_unit_vectors_and_kept_between_runs(
    monkeypatch: pytest.MonkeyPatch, gallery: Gallery
) -> None:
    assert torch.allclose(gallery.features.norm(dim=1), torch.ones(80), atol=1e-5)
    identification._gallery.cache_clear()

    def no_more(self: FeatureSpace, images: torch.Tensor) -> torch.Tensor:
        raise AssertionError("computed again")

    monkeypatch.setattr(FeatureSpace, "__call__", no_more)
    again = identification_of(load_spec({}, ["data.image_size=32", "audit.gallery=80"])).gallery
    assert again is not None
    assert torch.equal(again.features, gallery.features)


def test_it_can_be_switched_off_and_says_so() -> None:
    found = identification_of(load_spec({}, ["audit.gallery=0"]))
    assert found.gallery is None
    assert "switched off" in str(found.reason)

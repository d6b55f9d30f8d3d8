"""Chance: nothing found is called found as often as promised, and what was found stays found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import binom, binomtest

from fedsim.core.metrics import match_order
from fedsim.scoring.chance import DRAWS, Chance, Pool, Sitting, chance_of
from fedsim.scoring.identification import FeatureSpace, Gallery

SIZE = 6  # of a "picture": few dimensions, so that some pictures are like many others
LABELS = 8


def sitting(places: np.ndarray, guesses: np.ndarray, pictures: np.ndarray) -> Sitting:
    """Pictures and reconstructions as vectors, their own features."""
    blank = np.full((1, pictures.shape[1]), 0.1)
    rows = np.concatenate([guesses, blank])
    units, unit = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (rows, pictures))
    distance = ((guesses[:, None] - pictures[None]) ** 2).mean(2)
    return Sitting(places, units @ unit.T, distance)


def audit(
    batch: int,
    seed: int,
    *,
    victims: int = 4,
    one_class: bool = False,
    alike: bool = False,
    labelled: bool = False,
    noise: float | None = None,
) -> Chance:
    """Victims of a data set with a gallery of it, and what an attack made of them: vectors at
    random, or with ``noise`` the true pictures."""
    coin = np.random.default_rng([seed, batch])
    labels = np.repeat(np.arange(LABELS), 64)
    centres = 2 * coin.normal(size=(LABELS, SIZE))
    pictures = centres[labels] + coin.normal(size=(len(labels), SIZE))
    if one_class:
        rows = [coin.permutation(np.flatnonzero(labels == c))[:batch] for c in range(victims)]
    else:
        rows = list(coin.permutation(len(labels))[: victims * batch].reshape(victims, batch))
    gallery = np.zeros(len(labels), dtype=bool)
    gallery[coin.permutation(len(labels))[:400]] = True
    common = coin.normal(size=SIZE)
    sittings = []
    for own in rows:
        guesses = coin.normal(size=(batch, SIZE)) * 2
        if labelled:
            guesses = centres[labels[own]] + coin.normal(size=(batch, SIZE))
        if alike:
            guesses = np.tile(common, (batch, 1))
        if noise is not None:
            guesses = coin.permutation(pictures[own] + noise * coin.normal(size=(batch, SIZE)))
        sittings.append(sitting(own, guesses, pictures))
    return chance_of(Pool(labels, gallery), sittings, seed, counted=0 if noise is None else 256)


@pytest.mark.parametrize(
    "kind",
    [{}, {"one_class": True}, {"alike": True}, {"labelled": True}],
    ids=["unrelated", "clients of one class", "all alike", "of the true labels"],
)
@pytest.mark.parametrize("batch", [1, 4, 16, 32])
def test_unrelated_pictures_are_called_identified_as_seldom_as_promised(
    batch: int, kind: dict[str, bool]
) -> None:
    audits = 30
    found = np.array([audit(batch, seed, **kind).by_chance for seed in range(audits)])
    for level in (0.05, 0.001):
        allowed = binom.ppf(0.999, audits, level)  # a thousand to one, if the level is kept
        assert (found <= level).sum() <= allowed


def test_one_in_the_number_of_candidates_is_no_chance_for_a_matched_batch() -> None:
    naive = []
    for seed in range(10):
        found = audit(32, seed)
        hits = round(found.rate * found.of)
        naive.append(binomtest(hits, found.of, 1 / 401, alternative="greater").pvalue)
    assert (np.array(naive) < 0.001).mean() > 0.3


@pytest.mark.parametrize("batch", [1, 4, 16, 32])
def test_recovered_pictures_are_no_chance(batch: int) -> None:
    found = audit(batch, 0, noise=0.05)
    assert found.rate > 0.7
    assert found.of == 4 * batch
    assert found.chance < found.rate / 2
    assert found.by_chance == 1 / (1 + DRAWS)


def test_the_same_seed_gives_the_same_chance() -> None:
    assert audit(4, 3, noise=1.0) == audit(4, 3, noise=1.0)


def test_where_chance_does_as_well_few_arrangements_are_drawn() -> None:
    found = audit(16, 1)
    assert found.by_chance > 0.05
    assert found.draws < DRAWS / 2


def test_a_picture_counts_once_however_often_it_was_met() -> None:
    coin = np.random.default_rng(0)
    pictures = coin.normal(size=(64, SIZE))
    pool = Pool(np.zeros(64, dtype=int), np.arange(64) >= 8)
    once = [
        sitting(np.array([0]), pictures[:1], pictures),
        sitting(np.array([1]), -pictures[1:2], pictures),
    ]
    found = chance_of(pool, once, 0)
    again = chance_of(pool, [once[0], *once, once[1], once[1]], 0)  # another trial, later rounds
    assert (found.of, found.rate) == (again.of, again.rate) == (2, 0.5)
    assert again.by_chance == found.by_chance > 0.005
    torn = chance_of(pool, [once[0], sitting(np.array([0]), -pictures[:1], pictures)], 0)
    assert (torn.of, torn.rate) == (1, 0.5)


@pytest.mark.parametrize("claimed", [3, 5])
def test_hits_are_those_that_scoring_finds(claimed: int) -> None:
    coin = torch.Generator().manual_seed(2)
    images = torch.rand(40, 3, 4, 4, generator=coin)
    truth = images[:5]
    found = (truth[:claimed] + 0.8 * torch.randn(claimed, 3, 4, 4, generator=coin)).flip(0)
    space = FeatureSpace(None)
    digests = tuple(map(str, range(35)))
    gallery = Gallery(space, space(images[5:]), digests)
    blank = torch.full_like(truth[0], 0.5)
    matched = [found[row] if row >= 0 else blank for row in match_order(truth, found)]
    expected = gallery.identified(gallery.wanted(truth), torch.stack(matched))
    likeness = space(torch.cat([found, blank[None]])) @ space(images).T
    distance = (found[:, None] - images[None]).square().flatten(2).mean(2)
    mine = Sitting(np.arange(5), likeness.numpy(), distance.double().numpy())
    pool = Pool(np.zeros(40, dtype=int), np.arange(40) >= 5)
    assert 0 < sum(expected) < 5
    assert chance_of(pool, [mine], 0).rate == pytest.approx(np.mean(expected))


def test_pictures_change_places_within_their_stratum_alone() -> None:
    strata = np.array([3, 1, 3, 1, 7, 3])
    moved = np.array([0, 1, 2, 3, 5])
    at = Pool(strata, np.zeros(6, dtype=bool)).arrangements(moved, 200, np.random.default_rng(0))
    assert (strata[at] == strata).all()
    assert (np.sort(at, axis=1) == np.arange(6)).all()
    assert (at[:, 4] == 4).all()
    assert {tuple(row) for row in at[:, [0, 2, 5]]} == {
        *((0, 2, 5), (0, 5, 2), (2, 0, 5), (2, 5, 0), (5, 0, 2), (5, 2, 0))
    }


def test_without_anybody_to_stand_in_nothing_is_claimed() -> None:
    pictures = np.random.default_rng(0).normal(size=(20, SIZE))
    pool = Pool(np.arange(20), np.arange(20) > 0)
    found = chance_of(pool, [sitting(np.array([0]), pictures[:1], pictures)], 0)
    assert (found.rate, found.chance, found.by_chance) == (1, 1, 1)

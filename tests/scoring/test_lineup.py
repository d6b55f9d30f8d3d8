"""Line-ups: who could have stood in a true picture's place, and what a run is told of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fedsim.campaign.plan import jobs_of, victims
from fedsim.clients.data import ImageSet, pixel_digest
from fedsim.core.run import Run
from fedsim.scoring import lineup
from fedsim.scoring.identification import FeatureSpace, Gallery, identification_of
from fedsim.scoring.lineup import Batch, Lineup, Strata, chances, lineup_of
from tests.conftest import small_spec


class Noise(ImageSet):
    """Pictures at random."""

    def __init__(self, labels: list[int]) -> None:
        self.labels = np.array(labels, dtype=np.int64)
        self.classes = tuple(map(str, range(max(labels) + 1)))

    def image(self, index: int) -> torch.Tensor:
        coarse = torch.randint(0, 256, (3, 8, 8), generator=torch.Generator().manual_seed(index))
        return coarse / 255


def gallery_of(images: ImageSet, rows: list[int]) -> Gallery:
    space = FeatureSpace(None)
    pictures = torch.stack([images.image(row) for row in rows])
    return Gallery(space, space(pictures), tuple(map(pixel_digest, pictures)), tuple(rows))


def batch_of(images: ImageSet, rows: list[int]) -> Batch:
    pictures = torch.stack([images.image(row) for row in rows])
    return Batch(pictures, tuple(images.labels[rows].tolist()))


def test_pictures_of_a_label_stand_in_for_one_another_and_rare_labels_together() -> None:
    labels = np.array([0] * 9 + [1] * 8 + [2, 3, 3])
    strata = Strata.of(labels)
    assert len(set(strata.numbers[:9])) == len(set(strata.numbers[9:17])) == 1
    assert len(set(strata.numbers[17:])) == 1
    assert len(set(strata.numbers)) == 3
    assert strata.known[0, 2] == strata.known[0, 3] == strata.numbers[-1]


def test_under_a_natural_partition_they_are_of_the_same_client_too() -> None:
    labels, owners = np.array([0] * 16 + [1, 1, 2]), np.array([0] * 8 + [1] * 8 + [0, 1, 1])
    strata = Strata.of(labels, owners)
    assert strata.known[0, 0] != strata.known[1, 0]
    assert strata.known[0, 1] != strata.known[1, 1] == strata.known[1, 2]


def test_the_pool_holds_every_picture_once() -> None:
    images = Noise([0] * 20 + [1] * 20)
    gallery = gallery_of(images, [0, 1, 5, 20, 21])
    batches = {(1, 0): batch_of(images, [0, 7]), (1, 1): batch_of(images, [21, 2])}
    made = Lineup(gallery, images, Strata.of(images.labels), batches)
    assert made.pool.gallery.sum() == 5
    assert len(made.pool.strata) == 40  # all others of both labels are fetched to stand in
    assert sorted(np.bincount(made.pool.strata)) == [20, 20]
    (first,) = {tuple(made.sitting((1, 0), batch.images).places) for batch in [batches[1, 0]]}
    assert first == (0, 1)
    assert made.pool.gallery[[0, 1]].tolist() == [True, False]


def test_stand_ins_are_fetched_in_turn_and_not_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = Noise([0] * 30 + [1] * 30 + [2] * 30)
    batches = {(1, 0): batch_of(images, [0, 30])}
    strata = Strata.of(images.labels)
    gallery = gallery_of(images, [1, 60, 61])
    monkeypatch.setattr(lineup, "EXTRAS", 6)
    few = Lineup(gallery, images, strata, batches).pool
    assert np.bincount(few.strata).tolist() == [1 + 1 + 3, 1 + 3, 2]
    monkeypatch.setattr(lineup, "EXTRAS", 100)
    monkeypatch.setattr(lineup, "STAND_INS", 5)
    more = Lineup(gallery, images, strata, batches).pool
    assert np.bincount(more.strata).tolist() == [1 + 5, 1 + 5, 2]


def test_a_picture_of_no_known_label_keeps_its_place() -> None:
    images = Noise([0] * 20)
    stranger = Batch(torch.rand(1, 3, 8, 8), (7,))
    made = Lineup(
        gallery_of(images, [0, 1, 2]), images, Strata.of(images.labels), {(1, 0): stranger}
    )
    assert made.pool.strata[0] < 0
    found = made.chance([made.sitting((1, 0), stranger.images)])
    assert (found.rate, found.by_chance) == (1, 1)


def test_an_attack_may_return_nothing() -> None:
    images = Noise([0] * 20)
    batches = {(1, 0): batch_of(images, [3, 4])}
    made = Lineup(gallery_of(images, [0, 1, 2]), images, Strata.of(images.labels), batches)
    found = made.chance([made.sitting((1, 0), torch.empty(0, 3, 8, 8))])
    assert 0 <= found.rate <= 1
    assert found.by_chance > 0.01


def test_distances_are_those_by_which_scoring_matches() -> None:
    images = Noise([0] * 10)
    batches = {(1, 0): batch_of(images, [3, 4])}
    made = Lineup(gallery_of(images, [0, 1]), images, Strata.of(images.labels), batches)
    guess = torch.rand(2, 3, 8, 8)
    mine = made.sitting((1, 0), guess).distance[:, :2]
    expected = (guess[:, None] - batches[1, 0].images[None]).square().flatten(2).mean(2)
    assert mine == pytest.approx(expected.numpy(), abs=1e-5)


def test_a_run_is_told_what_its_rates_are_to_be_read_against(small_run: Run) -> None:
    jobs = jobs_of(small_run, small_run.spec, victims(small_run.spec))
    gallery = identification_of(small_run.spec).gallery
    assert gallery is not None
    told = chances(small_run, jobs, small_run.scores, gallery)
    solved, guessed = told["patch_solve"], told["prior_only"]
    assert (solved["space"], solved["gallery"]) == (gallery.space.name, 500)
    assert solved["by_chance"] < 1e-3 < guessed["by_chance"]
    assert solved["tested"] == 4
    assert solved["chance"] < 0.2
    entries = {entry["attack"]: entry["identification"] for entry in small_run.summary["verdicts"]}
    assert entries["patch_solve"]["rate"] == 1
    assert {key: entries["patch_solve"][key] for key in solved} == solved
    assert chances(small_run, jobs, small_run.scores, None) == {}
    assert chances(small_run, jobs, small_run.scores.assign(identified=None), gallery) == {}


def test_of_very_many_pictures_some_victims_are_tested(
    small_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineup, "MOST", 2)
    jobs = jobs_of(small_run, small_run.spec, victims(small_run.spec))
    gallery = identification_of(small_run.spec).gallery
    told = chances(small_run, jobs, small_run.scores, gallery)
    assert {entry["tested"] for entry in told.values()} == {2}


def test_a_natural_partition_looks_among_the_clients_own(monkeypatch: pytest.MonkeyPatch) -> None:
    images = Noise([0] * 40)
    monkeypatch.setattr(lineup, "images_of", lambda data, split: images)
    monkeypatch.setattr(lineup, "shards_of", lambda data, seed: (np.arange(10), np.arange(10, 40)))
    spec = small_spec("data.partition={kind: natural}")
    batches = {(1, 0): batch_of(images, [3]), (1, 1): batch_of(images, [30])}
    gallery = dataclasses.replace(gallery_of(images, [0, 20]))
    pool = lineup_of(spec, gallery, batches).pool
    assert np.bincount(pool.strata).tolist() == [10, 30]

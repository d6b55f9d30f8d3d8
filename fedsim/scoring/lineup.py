"""Line-up: the victims' pictures, those that could have been theirs, and the gallery, for a run.

Which pictures could have been drawn instead of the true ones? Those of the same label: partitions
deal each label's pictures out at random, and an attacker may know the labels. Under a natural
partition, where a client's pictures are of a kind, those of the same client and label. Of labels
(or of a client's labels) with fewer than eight pictures, all together. The gallery holds some of
them; where it holds fewer than 64 beside the victims' own, others of the data set stand in as well,
256 at most for a run.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedsim.campaign.jobs import Job
from fedsim.clients import images_of, shards_of, undealt
from fedsim.clients.data import ImageSet, pixel_digest
from fedsim.clients.data.pictures import packed, unpacked
from fedsim.core.errors import DataError
from fedsim.core.run import Run
from fedsim.core.spec import Spec
from fedsim.scoring.chance import Chance, Pool, Sitting, chance_of
from fedsim.scoring.identification import Gallery
from fedsim.scoring.scores import load_pictures

ALIKE = 8  # pictures; fewer of a label cannot stand in for one another
STAND_INS, EXTRAS = 64, 256  # wanted of every stratum, and fetched in all
MOST = 512  # pictures of victims; beyond, some victims are left out of the line-up
CHUNK = 64
SALT = 37

Address = tuple[int, int]  # round and client


@dataclass(frozen=True)
class Batch:
    """A victim's true pictures."""

    images: Tensor
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Strata:
    """Which pictures of a data set could have been drawn in each other's place."""

    numbers: np.ndarray  # (n,) the stratum of every picture
    known: Mapping[Address, int]  # by owner and label

    @classmethod
    def of(cls, labels: np.ndarray, owners: np.ndarray | None = None) -> Strata:
        """By label, and by owner where that matters."""
        owners = np.zeros_like(labels) if owners is None else owners
        pairs, kind, sizes = np.unique(
            np.stack([owners, labels], axis=1), axis=0, return_inverse=True, return_counts=True
        )
        merged = pairs.copy()
        merged[sizes < ALIKE, 1] = -1
        _, number = np.unique(merged, axis=0, return_inverse=True)
        number = number.reshape(-1)
        known = {(int(o), int(c)): int(n) for (o, c), n in zip(pairs, number, strict=True)}
        return cls(number[kind.reshape(-1)], known)


class Lineup:
    """A pool of pictures with what attacks on its victims are compared by."""

    def __init__(
        self,
        gallery: Gallery,
        images: ImageSet,
        strata: Strata,
        batches: Mapping[Address, Batch],
        *,
        natural: bool = False,
        seed: int = 0,
    ) -> None:
        self.space = gallery.space
        self._slots: dict[str, int] = {}
        self._strata: list[int] = []
        self._features: list[Tensor] = []
        self._pixels: list[Tensor] = []
        self._places = {
            at: self._add_batch(batch, [(at[1] if natural else 0, c) for c in batch.labels], strata)
            for at, batch in batches.items()
        }
        victims = len(self._slots)
        candidates = [
            self._slots[digest]
            if digest in self._slots
            else self._add(digest, int(strata.numbers[row]), features, images.image(row))
            for digest, features, row in zip(
                gallery.digests, gallery.features, gallery.rows, strict=True
            )
        ]
        own, others = set(self._strata[:victims]), Counter(self._strata[victims:])
        lacking = {n: STAND_INS - others[n] for n in sorted(own) if n >= 0}
        self._add_stand_ins(images, strata, lacking, set(gallery.rows), seed)
        member = np.zeros(len(self._slots), dtype=bool)
        member[candidates] = True
        self.pool = Pool(np.array(self._strata), member)
        self.seed = seed

    def _add_batch(self, batch: Batch, kinds: Sequence[Address], strata: Strata) -> np.ndarray:
        places = []
        features = self.space(batch.images)
        for picture, feature, kind in zip(batch.images, features, kinds, strict=True):
            stranger = -1 - len(self._slots)  # of no stratum but its own: nobody can stand in
            number = strata.known.get(kind, stranger)
            places.append(self._add(pixel_digest(picture), number, feature, picture))
        return np.array(places)

    def _add(self, digest: str, number: int, feature: Tensor, picture: Tensor) -> int:
        """The picture's place in the pool, where each stands once."""
        if digest not in self._slots:
            self._slots[digest] = len(self._slots)
            self._strata.append(number)
            self._features.append(feature)
            self._pixels.append(packed(picture))
        return self._slots[digest]

    def _add_stand_ins(
        self,
        images: ImageSet,
        strata: Strata,
        lacking: Mapping[int, int],
        taken: set[int],
        seed: int,
    ) -> None:
        """Pictures of the victims' strata beside the gallery's, one of each stratum in turn."""
        coin = np.random.default_rng([seed, SALT])
        rows = {
            number: iter(coin.permutation(np.flatnonzero(strata.numbers == number)))
            for number in lacking
        }
        left = {number: count for number, count in lacking.items() if count > 0}
        waiting, found = deque(left), dict[str, tuple[int, Tensor]]()
        while waiting and len(found) < EXTRAS:
            number = waiting.popleft()
            for row in rows[number]:
                picture = None if int(row) in taken else _readable(images, int(row))
                if picture is None:
                    continue
                digest = pixel_digest(picture)
                if digest not in self._slots and digest not in found:
                    found[digest] = number, picture
                    left[number] -= 1
                    if left[number]:
                        waiting.append(number)
                    break
        if found:
            features = self.space(torch.stack([picture for _, picture in found.values()]))
            for (digest, (number, picture)), feature in zip(found.items(), features, strict=True):
                self._add(digest, number, feature, picture)

    @functools.cached_property
    def _table(self) -> Tensor:
        return torch.stack(self._features)

    def sitting(self, victim: Address, guesses: Tensor) -> Sitting:
        """What a job made of one victim's pictures."""
        blank = guesses.new_full((1, *guesses.shape[1:]), 0.5)  # an image nobody claims
        likeness = self.space(torch.cat([guesses, blank])) @ self._table.T
        return Sitting(self._places[victim], likeness.numpy(), self._distances(guesses))

    def _distances(self, guesses: Tensor) -> np.ndarray:
        """The mean squared error of every guess to every picture of the pool."""
        mine = guesses.flatten(1).float()
        columns = []
        for at in range(0, len(self._pixels), CHUNK):
            theirs = torch.stack([unpacked(p) for p in self._pixels[at : at + CHUNK]]).flatten(1)
            cross = mine @ theirs.T
            columns.append(mine.square().sum(1)[:, None] + theirs.square().sum(1) - 2 * cross)
        return (torch.cat(columns, dim=1) / mine.shape[1]).double().numpy()

    def chance(self, sittings: Sequence[Sitting], **limits: int) -> Chance:
        return chance_of(self.pool, sittings, self.seed, **limits)


def _readable(images: ImageSet, row: int) -> Tensor | None:
    try:
        return images.image(row)
    except DataError:  # one picture less to stand in
        return None


def lineup_of(spec: Spec, gallery: Gallery, batches: Mapping[Address, Batch]) -> Lineup:
    """The line-up of these victims of a run."""
    images = images_of(undealt(spec.data), "train")
    natural = spec.data.partition.kind == "natural"
    owners = None
    if natural:
        owners = np.full(len(images), -1, dtype=np.int64)
        for client, rows in enumerate(shards_of(spec.data, spec.seed)):
            owners[rows] = client
    strata = Strata.of(images.labels.astype(np.int64), owners)
    return Lineup(gallery, images, strata, batches, natural=natural, seed=spec.seed)


def chances(
    run: Run, jobs: Iterable[Job], scores: pd.DataFrame, gallery: Gallery | None
) -> dict[str, dict[str, Any]]:
    """For every attack whose pictures were looked for in the gallery: what its rate is to be read
    against."""
    looked_for = scores.dropna(subset=["identified"])
    if gallery is None or looked_for.empty:
        return {}
    keys = ["attack", "round", "client", "trial"]
    scored = {(str(a), int(r), int(c), int(t)) for a, r, c, t in looked_for[keys].to_numpy()}
    mine = [job for job in jobs if (job.label, job.round, job.client, job.trial) in scored]
    batches = _batches(run, mine, run.spec.seed)
    lineup = lineup_of(run.spec, gallery, batches)
    told = {}
    for label in dict.fromkeys(job.label for job in mine):
        sittings = [
            lineup.sitting(at, _guesses(run, job))
            for job in mine
            if job.label == label and (at := (job.round, job.client)) in batches
        ]
        if sittings:
            chance = lineup.chance(sittings)
            told[label] = {
                "space": gallery.space.name,
                "gallery": len(gallery),
                "chance": chance.chance,
                "by_chance": chance.by_chance,
                "tested": chance.of,
                "draws": chance.draws,
            }
    return told


def _guesses(run: Run, job: Job) -> Tensor:
    """What a job made, in its own order."""
    pictures = load_pictures(run, job)
    assert pictures is not None  # it was scored
    return pictures.result.images


def _batches(run: Run, jobs: Sequence[Job], seed: int) -> dict[Address, Batch]:
    """The true pictures of the victims; of very many, whole victims at random."""
    by_victim = {(job.round, job.client): job for job in jobs}
    order = np.random.default_rng([seed, SALT]).permutation(len(by_victim))
    addresses = sorted(by_victim)
    batches: dict[Address, Batch] = {}
    count = 0
    for at in (addresses[place] for place in order):
        pictures = load_pictures(run, by_victim[at])
        assert pictures is not None  # it was scored
        count += len(pictures.labels)
        if batches and count > MOST:
            break
        batches[at] = Batch(pictures.sources, tuple(int(label) for label in pictures.labels))
    return dict(sorted(batches.items()))

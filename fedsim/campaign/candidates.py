"""Candidates of an update: who was in it, hidden among others of the same data set.

The others are of two kinds, as many of each as there are members: ``matched`` ones have exactly the
members' labels, so that nothing tells them apart but the pictures; ``any`` are drawn whatever their
labels are. They are pictures that the federation dealt to its clients and that nobody of the
round's cohort learned from in that round: what earlier rounds made of the weights, it made of them
as well. Where those do not suffice (everybody learns from all it has), the test split follows.
No picture is on the list twice, and none is the pixels of one behind the update.

Who is on the list, and in which order, is drawn by a hash of the truth. That makes the same list
whenever it is asked for, and whoever could draw it anew knows already what the list asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedsim.clients import images_of, shards_of
from fedsim.clients.data import ImageSet, pixel_digest
from fedsim.clients.shards import drawn_rows, simulated_holding
from fedsim.core.candidates import CANDIDATES, Candidates
from fedsim.core.errors import AttackError, DataError
from fedsim.core.spec import Spec
from fedsim.core.vault import Truth

MEMBER, MATCHED, ANY = "member", "matched", "any"


@dataclass(frozen=True)
class Listed:
    """A list as an attack gets it, and what scoring knows of each candidate: of which stratum it
    is, and by which digest its picture is known again."""

    candidates: Candidates
    strata: tuple[str, ...]
    digests: tuple[str, ...]


@dataclass(frozen=True)
class _Entry:
    picture: Tensor
    label: int
    stratum: str
    digest: str


def listed(spec: Spec, round_: int, truth: Truth, behind: Sequence[Truth]) -> Listed:
    """The list for the update of a client with this ``truth``; ``behind`` are the truths of all
    whose pictures are in what the server read."""
    if spec.captured is not None:
        raise AttackError(
            f"{CANDIDATES} are drawn from the clients' data set, and a captured run names none."
        )
    coin = np.random.default_rng(int(truth.digest()[:32], 16))
    pool = _Pool(spec, round_, coin, {pixel_digest(p) for one in behind for p in one.sources})
    entries: list[_Entry] = []
    members = list(_members(truth).values())
    for row in coin.permutation(len(members)):
        if len(entries) == 2 * spec.threat.candidates:
            break
        other = pool.draw(MATCHED, members[row].label)
        if other is not None:  # one that nothing can be put beside would be told by its label
            entries += [members[row], other]
    others = [pool.draw(ANY) for _ in range(len(entries) // 2)]
    if not entries or None in others:
        raise AttackError(
            "nobody else's pictures are left to hide the client's own among: its data set has too "
            "few that no client of the round learned from; use more data, or fewer clients a round."
        )
    entries += [other for other in others if other is not None]
    shuffled = [entries[row] for row in coin.permutation(len(entries))]
    pictures = torch.stack([entry.picture for entry in shuffled])
    labels = torch.tensor([entry.label for entry in shuffled])
    strata, digests = ([getattr(e, name) for e in shuffled] for name in ("stratum", "digest"))
    return Listed(Candidates(pictures, labels), tuple(strata), tuple(digests))


def _members(truth: Truth) -> dict[str, _Entry]:
    """The distinct pictures that a client learned from, as they were before any augmentation."""
    found: dict[str, _Entry] = {}
    for picture, label in zip(truth.sources, truth.labels.tolist(), strict=True):
        digest = pixel_digest(picture)
        found.setdefault(digest, _Entry(picture, label, MEMBER, digest))
    return found


@dataclass
class _Pool:
    """Pictures that nobody of a round's cohort learned from, in a random order; each is drawn
    once."""

    spec: Spec
    round: int
    coin: np.random.Generator
    seen: set[str]  # digests of what is not to be drawn
    _orders: dict[int | None, Iterator[tuple[ImageSet, int]]] = field(default_factory=dict)
    _dealt: np.ndarray | None = None

    def draw(self, stratum: str, label: int | None = None) -> _Entry | None:
        """The next one, of a label where one is named; None where there is none."""
        if label not in self._orders:
            self._orders[label] = self._order(label)
        for images, row in self._orders[label]:
            picture = images.image(row)
            digest = pixel_digest(picture)
            if digest not in self.seen:
                self.seen.add(digest)
                return _Entry(picture, int(images.labels[row]), stratum, digest)
        return None

    def _order(self, label: int | None) -> Iterator[tuple[ImageSet, int]]:
        train = images_of(self.spec.data, "train")
        if self._dealt is None:
            self._dealt = _left_over(self.spec, self.round)
        yield from ((train, row) for row in self._shuffled(train, self._dealt, label))
        try:
            test = images_of(self.spec.data, "test")
        except DataError:  # not every data set has one
            return
        if test.classes == train.classes:
            rows = np.arange(len(test.labels))
            yield from ((test, row) for row in self._shuffled(test, rows, label))

    def _shuffled(self, images: ImageSet, rows: np.ndarray, label: int | None) -> list[int]:
        if label is not None:
            rows = rows[np.asarray(images.labels)[rows] == label]
        found: list[int] = self.coin.permutation(rows).tolist()
        return found


def _left_over(spec: Spec, round_: int) -> np.ndarray:
    """Where the dealt pictures are that nobody of the round's cohort learned from in it."""
    used: list[np.ndarray] = []
    for client in spec.cohort(round_):
        held = simulated_holding(spec, client)
        used += [held.indices[rows] for rows in drawn_rows(spec, round_, client, held)]
    return np.setdiff1d(np.concatenate(shards_of(spec.data, spec.seed)), np.concatenate(used))

"""Surrogate: pictures of the attacker's own, kept apart from the clients'.

What counts is what is there, not what it is called: the same folder by any way to it, and the same
pixels under any name. A surrogate that is the clients' data is refused. Of one that shares some
pictures with them, those are left out, and the run tells how many. Of more than 50,000 pictures of
clients, so many are compared, and all that are attacked.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedsim.clients import draw_batches, images_of, shards_of, undealt
from fedsim.clients.data import digests_of, known_as, load_images, pixel_digest
from fedsim.clients.data.digests import UNREADABLE
from fedsim.core.errors import SpecError
from fedsim.core.knowledge import granted_by
from fedsim.core.spec import DataSpec, Spec

COMPARED = 50_000  # pictures of clients, of a larger data set at random
SEED = 41

Victims = Iterable[tuple[int, int]]


@dataclass(frozen=True)
class Surrogate:
    """The attacker's pictures, and what is known of their being the clients'."""

    images: Tensor
    shared: tuple[int, ...] = ()  # those that are the clients'
    compared: int = 0
    of: int = 0  # pictures of clients

    def apart(self) -> Surrogate:
        """Without what is the clients'."""
        kept = [row for row in range(len(self.images)) if row not in set(self.shared)]
        return replace(self, images=self.images[kept])

    def words(self, outcome: str) -> str | None:
        """How many are shared, and what came of it; None where none is."""
        if not self.shared:
            return None
        told = (
            f"{len(self.shared)} of the attacker's {len(self.images)} surrogate pictures are the "
            f"clients' own {outcome}"
        )
        if self.compared < self.of:
            told += (
                f"; {self.compared} of the clients' {self.of} pictures were compared, all attacked "
                f"ones among them"
            )
        return f"{told}."


def same_data(name: str, path: str | None, data: DataSpec) -> bool:
    """Whether a data set is that of ``data``, by whatever way its path leads there."""
    return known_as(name) == known_as(data.name) and _same_place(path, data.path)


def _same_place(one: str | None, other: str | None) -> bool:
    if one is None or other is None:
        return one == other
    first, second = (os.path.expanduser(path) for path in (one, other))
    try:
        return os.path.samefile(first, second)
    except OSError:  # one is not on this machine: what is left is where it would be
        return os.path.realpath(first) == os.path.realpath(second)
    except ValueError:  # no path at all, as whoever opens it will say
        return first == second


def check_surrogate(spec: Spec, attacked: Victims, *, at_hand: bool = True) -> None:
    """Refuse surrogate data that is not granted, or is the clients' own. Where their data set is
    not ``at_hand``, only its name and path can be compared."""
    source = spec.threat.surrogate
    if source is None:
        return
    if "surrogate" not in granted_by(spec.threat):
        raise SpecError(f"threat {spec.threat.model} grants no surrogate data; threat D does.")
    if same_data(source.name, source.path, spec.data):
        raise SpecError("threat.surrogate is the clients' own data; give the attacker other data.")
    found = find_surrogate(spec, attacked) if at_hand else None
    if found is not None and len(found.shared) == len(found.images):
        raise SpecError(
            f"threat.surrogate is the clients' own data: all {len(found.images)} of its pictures "
            f"are theirs; give the attacker other data."
        )


def find_surrogate(spec: Spec, attacked: Victims, *, at_hand: bool = True) -> Surrogate | None:
    """All pictures of the attacker's own that the spec names, and which of them are the clients',
    where that can be seen."""
    source = spec.threat.surrogate
    if source is None:
        return None
    data = DataSpec(name=source.name, path=source.path, image_size=spec.data.image_size)
    images = load_images(data, "train")
    chosen = torch.stack([images.image(row) for row in _drawn(len(images), source.pictures)])
    if not at_hand:
        return Surrogate(chosen)
    known, of, compared = _clients_digests(spec, tuple(attacked))
    shared = [row for row, picture in enumerate(chosen) if pixel_digest(picture) in known]
    return Surrogate(chosen, tuple(shared), compared, of)


def _drawn(count: int, most: int) -> list[int]:
    """Which pictures the attacker gets: all, or some at random, as files lie class by class."""
    if count <= most:
        return list(range(count))
    return sorted(np.random.default_rng(SEED).permutation(count)[:most].tolist())


def _clients_digests(
    spec: Spec, attacked: tuple[tuple[int, int], ...]
) -> tuple[frozenset[str], int, int]:
    """The pictures that clients hold, as digests; how many they hold; how many were compared."""
    rows, digests = _data_digests(undealt(spec.data))
    dealt = np.concatenate(shards_of(spec.data, spec.seed))
    theirs = np.isin(rows, dealt)
    known = {digest for digest, own in zip(digests, theirs, strict=True) if own}
    seen = set(rows[theirs].tolist())
    if len(seen) < len(dealt):
        for round_, client in attacked:
            for indices, (pictures, _) in draw_batches(spec, round_, client):
                seen |= set(indices)
                known |= {pixel_digest(picture) for picture in pictures}
    return frozenset(known - {UNREADABLE}), len(dealt), len(seen)


@functools.lru_cache(maxsize=4)
def _data_digests(data: DataSpec) -> tuple[np.ndarray, tuple[str, ...]]:
    """The rows of a data set that are compared, and their digests."""
    # From the source itself: each picture is read once, so a cache would be in vain.
    images = images_of(data, "train").source
    rows = np.random.default_rng(SEED).permutation(len(images))[:COMPARED]
    rows.sort()
    return rows, tuple(digests_of(images, rows))

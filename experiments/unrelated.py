"""Unrelated pictures: how often identification takes chance for a leak.

    python experiments/unrelated.py [--trials 1000] [--batch 1 4 16 32] [--features pixels]

Victims' batches are drawn from the embedded photos, and "reconstructed" by pictures that have
nothing to do with them, in five ways:

    drawn anew  pictures of the same data set, some of which may be the victims' own by chance
    others      crops that no client holds, of any photograph
    same label  crops that no client holds, of the true labels: an attacker who knows no more
    one class   others again, but every client holds pictures of a single label
    all alike   the same crop for every picture of every victim

Every p-value below 5 % (or 0.1 %) is a false alarm; of honest p-values at most so many are. The
last column has what the binomial law makes of the same hits, with one in the number of candidates
as the chance of each.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from rich.progress import track
from scipy.stats import binomtest
from torch import Tensor

from fedsim.clients import images_of
from fedsim.clients.data import pixel_digest
from fedsim.core.spec import DataSpec, load_spec
from fedsim.scoring.identification import FeatureSpace, Gallery, feature_space, identification_of
from fedsim.scoring.lineup import Batch, Lineup, Strata

WAYS = ("drawn anew", "others", "same label", "one class", "all alike")
DATA = DataSpec(image_size=32)


class Memory(FeatureSpace):
    """A feature space that sees each picture once."""

    def __init__(self, space: FeatureSpace) -> None:
        super().__init__(space.prior)
        self._known: dict[str, Tensor] = {}

    def __call__(self, images: Tensor) -> Tensor:
        digests = [pixel_digest(picture) for picture in images]
        for digest, picture in zip(digests, images, strict=True):
            if digest not in self._known:
                self._known[digest] = super().__call__(picture[None])[0]
        return torch.stack([self._known[digest] for digest in digests])


def draw(way: str, batch: int, victims: int, coin: np.random.Generator) -> Iterator[np.ndarray]:
    """The rows of each victim's pictures."""
    labels = images_of(DATA, "train").labels
    if way != "one class":
        yield from coin.permutation(len(labels))[: victims * batch].reshape(victims, batch)
        return
    for label in coin.permutation(np.unique(labels))[:victims]:
        yield coin.permutation(np.flatnonzero(labels == label))[:batch]


def guess(way: str, truth: np.ndarray, coin: np.random.Generator) -> Tensor:
    """Pictures in place of a reconstruction, which saw no more than ``way`` says."""
    clients = images_of(DATA, "train")
    images = clients if way == "drawn anew" else images_of(DATA, "test")
    if way == "same label":
        labels = clients.labels[truth].tolist()
        by_label = {label: np.flatnonzero(images.labels == label) for label in set(labels)}
        rows = [coin.choice(by_label[label]) for label in labels]
    else:
        rows = coin.choice(len(images), len(truth), replace=False).tolist()
    return torch.stack([images.image(int(row)) for row in rows])


def trial(
    way: str, batch: int, victims: int, gallery: Gallery, seed: int, draws: int
) -> tuple[float, float]:
    """The p-value of one audit that found nothing, and the binomial one."""
    coin = np.random.default_rng([seed, batch, WAYS.index(way)])
    images = images_of(DATA, "train")
    batches = {}
    rows = dict(enumerate(draw(way, batch, victims, coin)))
    for client, own in rows.items():
        pictures = torch.stack([images.image(int(row)) for row in own])
        batches[1, client] = Batch(pictures, tuple(images.labels[own].tolist()))
    lineup = Lineup(gallery, images, Strata.of(images.labels), batches, seed=seed)
    guesses = {client: guess(way, own, coin) for client, own in rows.items()}
    if way == "all alike":
        guesses = {client: guesses[0][:1].expand_as(made) for client, made in guesses.items()}
    sittings = [lineup.sitting((1, client), made) for client, made in guesses.items()]
    found = lineup.chance(sittings, draws=draws, counted=0)
    hits = round(found.rate * found.of)
    naive = binomtest(hits, found.of, 1 / (len(gallery) + 1), alternative="greater")
    return found.by_chance, float(naive.pvalue)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--victims", type=int, default=4)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--features", default="prior", choices=["prior", "pixels"])
    parser.add_argument("--draws", type=int, default=9_999)
    asked = parser.parse_args()
    found = identification_of(load_spec({}, [f"audit.features={asked.features}"])).gallery
    assert found is not None
    space = Memory(feature_space(asked.features))
    gallery = Gallery(space, found.features, found.digests, found.rows)
    print("| reconstructions | batch | audits | p < 0.05 | p < 0.001 | binomial p < 0.001 |")
    print("|---|---|---|---|---|---|")
    for way in asked.ways:
        for batch in asked.batch:
            pairs = np.array(
                [
                    trial(way, batch, asked.victims, gallery, seed, asked.draws)
                    for seed in track(range(asked.trials), f"{way}, {batch}", transient=True)
                ]
            )
            honest, naive = pairs.T
            counts = [(honest < 0.05).mean(), (honest < 0.001).mean(), (naive < 0.001).mean()]
            shown = " | ".join(f"{100 * share:.1f} %" for share in counts)
            print(f"| {way} | {batch} | {asked.trials} | {shown} |", flush=True)


if __name__ == "__main__":
    main()

"""What fishing and inconsistent weights give an active server: tables in markdown.

    python -m experiments.active.fishing [--path PICTURES] [--cifar10 CIFAR10] [--parts abcdef]

PICTURES is a tree of class/picture; without it, the photos that come with scikit-image. Where a
part wants distinct labels, every picture is a class of its own. PSNR in dB by `patch_solve` without
the move onto the 8-bit grid; the server sees updates alone. Parts: a) a batch of 64, b) secure
sums, c) batches of one class, d) local steps, e) a ResNet and gradient matching, f) other attacks
on what is isolated. Networks trained on CIFAR-10 are tried on its test split, where CIFAR10 tells
where that is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from scipy.stats import binomtest
from torch import Tensor

from experiments.active.server import (
    FIXED_POINT,
    Server,
    best_match,
    coin,
    fresh_weights,
    load_pictures,
    mean_of,
    row,
    spread,
    table,
    trained_weights,
    weights_after_rounds,
)
from experiments.training.cifar10 import NETWORKS
from fedsim.attacks.manoeuvres import create_manoeuvre
from fedsim.clients.data import load_images
from fedsim.core.errors import AttackError
from fedsim.core.learning import Batch
from fedsim.core.manoeuvre import Sighting
from fedsim.core.spec import DataSpec, ModelSpec, TrainSpec, Upload

TINY, SMALL = ModelSpec(), ModelSpec(name="vit_small_patch16_224")


# -- a: one of 64 -------------------------------------------------------------------------------


def one_of_64(asked: Asked) -> None:
    table("a) model", "clients", "dB, median (range)", ">= 60 dB", "claims of one", "s per attack")
    for words, model, side, rounds in (
        ("ViT-Ti/16 at 160", TINY, 160, 0),
        ("ViT-Ti/16 at 160, after three rounds of FedAvg", TINY, 160, 3),
        ("ViT-S/16 at 224", SMALL, 224, 0),
        ("ViT-S/16 at 224, after three rounds of FedAvg", SMALL, 224, 3),
    ):
        images = load_pictures(asked.path, side)
        weights = weights_after_rounds(model, images, rounds=rounds)
        caught = Catch()
        for trial in range(2 if asked.quick else 8):
            rows = torch.randperm(len(images), generator=coin(trial))[:64]
            fishing = create_manoeuvre("fishing", target=int(rows[trial]))
            server = Server(fishing, model, side, len(images), _batch_of(64), weights)
            caught.add(server, (images[rows], rows), trial)
        caught.print(words)
    if asked.cifar10:
        pictures, labels = asked.cifar_pictures()
        weights = trained_weights("vit8")
        caught = Catch()
        for trial in range(2 if asked.quick else 8):
            rows = _one_of_its_class(labels, 64, trial)
            fishing = create_manoeuvre("fishing", target=int(labels[rows[0]]))
            server = Server(fishing, NETWORKS["vit8"].model, 32, 10, _batch_of(64), weights)
            caught.add(server, (pictures[rows], labels[rows]), 0)
        caught.print("ViT/8 at 32 trained on CIFAR-10, one picture of the class")


@dataclass
class Catch:
    """Of clients whose one picture was fished for: how near it came, and how long it took."""

    found: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    claims: int = 0

    def add(self, server: Server, batch: Batch, target: int) -> None:
        (seen,) = server.round([[batch]])
        began = time.perf_counter()
        isolated = server.isolated(seen)
        result = server.solved(seen, isolated, snap=False)
        self.seconds.append(time.perf_counter() - began)
        self.claims += isolated.pictures == 1
        self.found.append(best_match(result, batch[0][target][None]))

    def print(self, words: str) -> None:
        good = f"{sum(db >= 60 for db in self.found)} of {len(self.found)}"
        seconds = f"{statistics.mean(self.seconds):.1f}"
        row(words, len(self.found), spread(self.found), good, self.claims, seconds)


def _batch_of(size: int, mode: Literal["train", "eval"] = "eval") -> TrainSpec:
    return TrainSpec(batch_size=size, mode=mode)


def _one_of_its_class(labels: Tensor, size: int, seed: int) -> Tensor:
    """So many pictures at random, the first of a class that no other is of."""
    rows = torch.randperm(len(labels), generator=coin(seed))
    others = rows[labels[rows] != labels[rows[0]]]
    return torch.cat([rows[:1], others[: size - 1]])


# -- b: secure sums -----------------------------------------------------------------------------


def secure_sums(asked: Asked) -> None:
    table("b) 8 clients x 8 pictures, ViT-Ti/16 at 160", "exact sum, dB", "2^-24, dB", "says")
    images = load_pictures(asked.path, 160)
    weights = fresh_weights(TINY, images)
    for words, name, params in (
        ("fishing", "fishing", {"target": 0}),
        ("fishing, row of 1", "fishing", {"target": 0, "row": 1.0}),
        ("inconsistent + fishing", "inconsistent", {"lure": {"name": "fishing", "target": 0}}),
    ):
        exact: list[float] = []
        rounded: list[float] = []
        says = ""
        for trial in range(1 if asked.quick else 4):
            rows = torch.randperm(len(images), generator=coin(trial))[:64]
            labels = torch.arange(1, 65)
            labels[11] = 0  # the picture that is fished for, of client 1
            clients = [
                [(images[r], y)] for r, y in zip(rows.split(8), labels.split(8), strict=True)
            ]
            victim = {"victim": 1} if name == "inconsistent" else {}
            manoeuvre = create_manoeuvre(name, **params, **victim)
            server = Server(manoeuvre, TINY, 160, len(images), _batch_of(8), weights, sums=True)
            for found, bits in ((rounded, FIXED_POINT), (exact, 60)):
                seen = server.round(clients, bits=bits)[1]
                isolated = server.isolated(seen)
                says = isolated.words
                result = server.solved(seen, isolated, snap=False)
                found.append(best_match(result, images[rows[11]][None]))
        row(words, spread(exact), spread(rounded), says)
    _gated_sums(asked, images)


def _gated_sums(asked: Asked, images: Tensor) -> None:
    """Eight clients of two pictures, all of one class: a gate before the sum of sixteen."""
    weights, tally = fresh_weights(TINY, images[:100]), Tally()
    for trial in range(2 if asked.quick else 20):
        rows = torch.randperm(len(images), generator=coin(trial))
        fishing = create_manoeuvre("fishing", kind="feature", target=5, threshold="surrogate")
        surrogate = images[rows[16:112]]
        server = Server(fishing, TINY, 160, 100, _batch_of(2), weights, surrogate, sums=True)
        clients = [[(images[r], torch.full((2,), 5))] for r in rows[:16].split(2)]
        seen = server.round(clients, trial + 1)[0]
        tally.count(server, seen, images[rows[:16]])
    tally.header("b) secure sum of 8 clients x 2 pictures of one class")
    tally.print("one round, surrogate")


# -- c: one class -------------------------------------------------------------------------------


def one_class(asked: Asked) -> None:
    images = load_pictures(asked.path, 160)
    weights = fresh_weights(TINY, images[:100])
    Tally.header("c) 16 pictures of one class, ViT-Ti/16 at 160")
    for words, threshold, upload in (
        ("one round, surrogate", "surrogate", Upload.GRADIENT),
        ("one round, blind", "blind", Upload.GRADIENT),
        ("one round, surrogate, one SGD step", "surrogate", Upload.DELTA),
    ):
        tally = Tally()
        for trial in range(4 if asked.quick else 40):
            rows = torch.randperm(len(images), generator=coin(trial))
            server = _gated(threshold, upload, weights, images[rows[16:112]])
            batch = (images[rows[:16]], torch.full((16,), 5))
            (seen,) = server.round([[batch]], trial + 1)
            tally.count(server, seen, batch[0])
        tally.print(words)
    for words, upload, last in (
        ("up to 3 rounds, the batch kept, blind start", Upload.GRADIENT, 3),
        ("up to 8 rounds of one SGD step, the batch kept", Upload.DELTA, 8),
    ):
        tally = Tally()
        for trial in range(3 if asked.quick else 40):
            rows = torch.randperm(len(images), generator=coin(100 + trial))
            server = _gated("auto", upload, weights, None)
            batch = (images[rows[:16]], torch.full((16,), 5))
            for round_ in range(1, last + 1):
                client = Tally()
                (seen,) = server.round([[batch]], 10 * trial + round_)
                client.count(server, seen, batch[0])
                if client.claimed or round_ == last:
                    tally.add(client)
                    break
        tally.print(words)


@dataclass
class Tally:
    """Of rounds or clients: what was claimed, and how near what came out is to a picture."""

    claimed: list[float] = field(default_factory=list)
    unclaimed: list[float] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.claimed += other.claimed
        self.unclaimed += other.unclaimed

    def count(self, server: Server, seen: Sighting, truths: Tensor) -> None:
        isolated = server.isolated(seen)
        if isolated.pictures == 0:
            self.unclaimed.append(0.0)
            return
        result = server.solved(seen, replace(isolated, pictures=1), snap=False)
        into = self.claimed if isolated.pictures == 1 else self.unclaimed
        into.append(best_match(result, truths))

    @staticmethod
    def header(title: str) -> None:
        claims = ("claims of one", "of them below 30 dB", "unclaimed, but >= 40 dB")
        table(title, "rounds or clients", ">= 40 dB (95 %)", *claims, "median dB of claims")

    def print(self, words: str) -> None:
        both = self.claimed + self.unclaimed
        good = sum(db >= 40 for db in both)
        limits = binomtest(good, len(both)).proportion_ci(method="exact")
        row(
            words,
            len(both),
            f"{good} ({100 * limits.low:.0f} to {100 * limits.high:.0f} %)",
            len(self.claimed),
            sum(db < 30 for db in self.claimed),
            sum(db >= 40 for db in self.unclaimed),
            f"{statistics.median(self.claimed or [0.0]):.1f}",
        )


def _gated(
    threshold: str, upload: Upload, weights: dict[str, Tensor], surrogate: Tensor | None
) -> Server:
    fishing = create_manoeuvre("fishing", kind="feature", target=5, threshold=threshold)
    train = TrainSpec(batch_size=16, mode="eval", upload=upload, lr=0.05)
    return Server(fishing, TINY, 160, 100, train, weights, surrogate)


# -- d: local steps -----------------------------------------------------------------------------


def local_steps(asked: Asked) -> None:
    table("d) SGD, lr .01, batch 8, ViT-Ti/16 at 160", "clients", "dB, median (range)", "loss")
    images = load_pictures(asked.path, 160)
    weights = fresh_weights(TINY, images)
    for steps in (5, 20):
        for words, again in (("the same batch", True), ("new batches", False)):
            found, losses = [], []
            for trial in range(1 if asked.quick else 6):
                rows = torch.randperm(len(images), generator=coin(trial))
                rows = rows[:8].repeat(steps) if again else rows[: 8 * steps]
                at = trial if again else 8 * (steps // 2) + trial
                train = TrainSpec(
                    batch_size=8, local_steps=steps, lr=0.01, upload=Upload.DELTA, mode="eval"
                )
                fishing = create_manoeuvre("fishing", target=int(rows[at]))
                server = Server(fishing, TINY, 160, len(images), train, weights)
                (seen,) = server.round([[(images[r], r) for r in rows.split(8)]])
                isolated = server.isolated(seen)
                result = server.solved(seen, replace(isolated, pictures=1), snap=False)
                found.append(best_match(result, images[rows[at]][None]))
                losses.append(seen.update.loss)
            row(f"{steps} steps, {words}", len(found), spread(found), f"{max(losses):.0f}")


# -- e: a ResNet --------------------------------------------------------------------------------


def resnet(asked: Asked) -> None:
    """The same picture of the same batch, attacked with all of it, and fished out of it. A step on
    one picture costs a sixteenth of a step on sixteen: both have the same number of picture
    gradients, and the fished one is shown with as many steps as well."""
    if not asked.cifar10:
        print("\ne) needs --cifar10")
        return
    pictures, labels = asked.cifar_pictures()
    weights = trained_weights("resnet")
    steps, count = (20, 2) if asked.quick else (300, 8)
    table(
        "e) ResNet trained on CIFAR-10, batch 16, inverting_gradients",
        "batches",
        "dB, mean +- 95 %",
        "above the whole batch, paired",
    )
    base: list[float] = []
    cases: list[tuple[str, Literal["train", "eval"], int]] = [
        (f"with its whole batch, {steps} steps", "eval", 0),
        (f"fished, {steps} steps", "eval", steps),
        (f"fished, {16 * steps} steps (as many picture gradients)", "eval", 16 * steps),
        (f"fished, BatchNorm in train mode, {steps} steps", "train", steps),
    ]
    for words, mode, fished in cases:
        found = []
        for trial in range(count):
            rows = _one_of_its_class(labels, 16, trial)
            batch = (pictures[rows], labels[rows])
            fishing = create_manoeuvre("fishing", target=int(labels[rows[0]]))
            server = Server(fishing, NETWORKS["resnet"].model, 32, 10, _batch_of(16, mode), weights)
            if fished:
                (seen,) = server.round([[batch]])
                isolated = server.isolated(seen)
                protocol = replace(server.public.protocol, mode="eval")
                server.public = replace(server.public, protocol=protocol)
                result = server.solved(seen, isolated, "inverting_gradients", steps=fished)
            else:
                seen, whole = server.honest(batch)
                result = server.solved(seen, whole, "inverting_gradients", steps=steps)[:1]
            found.append(best_match(result, batch[0][:1]))
        base = base or found
        row(
            words, count, mean_of(found), mean_of([f - b for f, b in zip(found, base, strict=True)])
        )


# -- f: other attacks ---------------------------------------------------------------------------


def composed(asked: Asked) -> None:
    """What other attacks make of an isolated picture, beside a batch of that picture alone."""
    images = load_pictures(asked.path, 32)
    vit = ModelSpec(options={"patch_size": 4, "depth": 4})
    wide = ModelSpec(options={"patch_size": 8, "depth": 4})
    chain = ModelSpec(
        name="convnet", options={"activation": "leaky_relu", "channels": [12, 24], "strides": 2}
    )
    steps = 20 if asked.quick else 400
    table("f) one of 16 at 32 px", "pictures", "fished, dB", "alone, dB", "with its batch, dB")
    for attack, model, params in (
        ("row_space", wide, {}),
        ("rgap", chain, {}),
        ("inverting_gradients", vit, {"steps": steps}),
        ("gradvit", vit, {"steps": steps, "seeds": 1, "preset": "cpu"}),
    ):
        weights = fresh_weights(model, images)
        fished: list[float] = []
        alone: list[float] = []
        mixed: list[float] = []
        for trial in range(2 if asked.quick else 6):
            rows = torch.randperm(len(images), generator=coin(trial))[:16]
            fishing = create_manoeuvre("fishing", target=int(rows[0]))
            server = Server(fishing, model, 32, len(images), _batch_of(16), weights)
            truth, batch = images[rows[:1]], (images[rows], rows)
            (seen,) = server.round([[batch]])
            result = server.solved(seen, server.isolated(seen), attack, **params)
            fished.append(best_match(result, truth))
            for found, some in ((alone, (truth, rows[:1])), (mixed, batch)):
                try:
                    result = server.solved(*server.honest(some), attack, **params)
                except AttackError:
                    continue
                found.append(best_match(result[:1], truth))
        whole = spread(mixed) if mixed else "declined"
        row(attack, len(fished), spread(fished), spread(alone), whole)


@dataclass(frozen=True)
class Asked:
    path: str | None
    cifar10: str | None
    quick: bool

    def cifar_pictures(self) -> tuple[Tensor, Tensor]:
        """A thousand of the test split, on which no network of ours was trained."""
        images = load_images(DataSpec(name="cifar10", path=self.cifar10, image_size=32), "test")
        rows = torch.randperm(len(images), generator=coin(7))[:1000].tolist()
        labels = torch.as_tensor(images.labels[rows])
        return torch.stack([images.image(row) for row in rows]), labels


PARTS = {
    "a": one_of_64,
    "b": secure_sums,
    "c": one_class,
    "d": local_steps,
    "e": resnet,
    "f": composed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", help="a tree of class/picture")
    parser.add_argument("--cifar10", help="CIFAR-10: a tree, its batches or its zips")
    parser.add_argument("--parts", default="abcdef")
    parser.add_argument("--quick", action="store_true", help="few trials, to see that it runs")
    options = parser.parse_args()
    for part in options.parts:
        PARTS[part](Asked(options.path, options.cifar10, options.quick))


if __name__ == "__main__":
    main()

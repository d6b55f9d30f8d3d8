"""What fishing and inconsistent weights give an active server: tables in markdown.

    python experiments/active/fishing.py [--path PICTURES] [--parts abcde] [--quick]

PICTURES is a tree of class/picture; without it, the photos that come with scikit-image. Where a
part wants distinct labels, every picture is a class of its own. PSNR in dB by `patch_solve` without
the move onto the 8-bit grid; the server sees updates alone. Parts: a) a batch of 64, b) secure
sums, c) batches of one class, d) local steps, e) a ResNet and gradient matching.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedsim.attacks import create_attack
from fedsim.attacks.manoeuvres import create_manoeuvre
from fedsim.clients.data import load_images
from fedsim.core.attack import no_progress
from fedsim.core.knowledge import THREATS, Announced, Secrets, View
from fedsim.core.learning import Batch, Update, local_update
from fedsim.core.manoeuvre import Brief, Isolated, Manoeuvre, Memory, Sighting, Tampered
from fedsim.core.metrics import psnr
from fedsim.core.models import build_model
from fedsim.core.observation import Observation, Public
from fedsim.core.spec import DataSpec, ModelSpec, Spec, TrainSpec, Upload

CPU = torch.device("cpu")
TINY, SMALL = ModelSpec(), ModelSpec(name="vit_small_patch16_224")
RESNET = ModelSpec(name="resnet18")
SUMS = [{"name": "secure_aggregation", "bits": 24}]


def load_pictures(path: str | None, side: int) -> Tensor:
    """All pictures there are, (N, 3, H, W) in [0, 1]."""
    data = DataSpec(image_size=side)
    if path:
        data = DataSpec(name="imagefolder", path=path, image_size=side)
    splits = [load_images(data, "train"), load_images(data, "test")]
    return torch.stack([images.image(row) for images in splits for row in range(len(images))])


@dataclass
class Server:
    """A server with one manoeuvre, and clients that answer it."""

    manoeuvre: Manoeuvre
    model: ModelSpec
    side: int
    classes: int
    train: TrainSpec
    weights: dict[str, Tensor]
    surrogate: Tensor | None = None
    sums: bool = False
    memory: Memory = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = Spec(data=DataSpec(image_size=self.side), model=self.model, train=self.train)
        self.public = replace(Public.of(spec, self.classes), defenses=SUMS if self.sums else [])

    def factory(self) -> nn.Module:
        return build_model(self.model, image_size=self.side, num_classes=self.classes, seed=0)

    def sent(self, round_: int, client: int, cohort: Sequence[int]) -> Tampered:
        brief = Brief(
            round=round_,
            client=client,
            cohort=tuple(cohort),
            weights=self.weights,
            model=self.factory,
            public=self.public,
            surrogate=self.surrogate,
            memory=self.memory,
        )
        return self.manoeuvre.tamper(brief)

    def round(self, clients: Sequence[Sequence[Batch]], round_: int = 1) -> list[Sighting]:
        """What the server sees of one round, learned from; under sums the mean, for everyone."""
        cohort = range(len(clients))
        sent = [self.sent(round_, client, cohort) for client in cohort]
        received = [{**self.weights, **tampered.changed} for tampered in sent]
        updates = [self._answer(w, b) for w, b in zip(received, clients, strict=True)]
        counts = [sum(len(labels) for _, labels in batches) for batches in clients]
        if self.sums:
            updates = [_fixed_point_mean(updates)] * len(clients)
            counts = [sum(counts)] * len(clients)
        seen = [
            Sighting(
                round_, c, received[c], updates[c], sent[c].about, self.factory, self.public, n
            )
            for c, n in zip(cohort, counts, strict=True)
        ]
        for sighting in seen:
            self.manoeuvre.learn(sighting, self.memory)
        return seen

    def _answer(self, weights: Mapping[str, Tensor], batches: Sequence[Batch]) -> Update:
        model = self.factory()
        model.load_state_dict(dict(weights))
        return local_update(model, batches, self.public.protocol)

    def solved(
        self, seen: Sighting, isolated: Isolated, attack: str = "patch_solve", **params: Any
    ) -> Tensor:
        """The attack's pictures, (B, 3, H, W), of what is isolated."""
        public = replace(self.public, batch_size=max(1, isolated.pictures), defenses=[])
        observation = Observation(
            seen.round, seen.client, dict(seen.weights), isolated.update, public
        )
        grants = THREATS["C"].grants | {"oracle_labels"}
        secrets = Secrets(labels=isolated.labels)
        view = View(observation, grants, Announced(self.factory), secrets=secrets)
        found = create_attack(attack, **params)
        return found.reconstruct(view, device=CPU, progress=no_progress).images


def _fixed_point_mean(updates: Sequence[Update], bits: int = 24) -> Update:
    """As a secure sum gives it: every upload is rounded to 2^-bits."""
    tensors = {}
    for name in updates[0].tensors:
        rounded = [(update.tensors[name].double() * 2**bits).round() for update in updates]
        tensors[name] = (torch.stack(rounded).sum(0) / 2**bits / len(updates)).float()
    return replace(updates[0], tensors=tensors)


def best_match(images: Tensor, truths: Tensor) -> float:
    return max(float(psnr(truth[None], image[None])) for image in images for truth in truths)


def fresh_weights(
    model: ModelSpec, images: Tensor, *, steps: int = 0, mode: str = "eval"
) -> dict[str, Tensor]:
    """Of a model as it is made, or after so many SGD steps on batches of 32."""
    side = images.shape[-1]
    net = build_model(model, image_size=side, num_classes=len(images), seed=0)
    net.train(mode == "train")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for step in range(steps):
        rows = torch.randperm(len(images), generator=_coin(step))[:32]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net((images[rows] - 0.5) / 0.5), rows)
        loss.backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def _coin(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def table(*header: str) -> None:
    print(f"\n| {' | '.join(header)} |\n|{'---|' * len(header)}", flush=True)


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


# -- a: one of 64 -------------------------------------------------------------------------------


def one_of_64(path: str | None, quick: bool) -> None:
    table("a) model", "clients", "dB, median (range)", ">= 60 dB", "claims of one", "s per attack")
    for words, model, side, steps in (
        ("ViT-Ti/16 at 160", TINY, 160, 0),
        ("ViT-Ti/16 at 160, trained 9 steps", TINY, 160, 9),
        ("ViT-S/16 at 224", SMALL, 224, 0),
    ):
        images = load_pictures(path, side)
        weights = fresh_weights(model, images, steps=steps)
        found, claims, seconds = [], 0, []
        for trial in range(2 if quick else 8):
            rows = torch.randperm(len(images), generator=_coin(trial))[:64]
            fishing = create_manoeuvre("fishing", target=int(rows[trial]))
            train = TrainSpec(batch_size=64, mode="eval")
            server = Server(fishing, model, side, len(images), train, weights)
            (seen,) = server.round([[(images[rows], rows)]])
            began = time.perf_counter()
            isolated = fishing.isolate(seen)
            assert isolated is not None
            result = server.solved(seen, isolated, snap=False)
            seconds.append(time.perf_counter() - began)
            claims += isolated.pictures == 1
            found.append(best_match(result, images[rows[trial]][None]))
        good = f"{sum(db >= 60 for db in found)} of {len(found)}"
        row(words, len(found), spread(found), good, claims, f"{statistics.mean(seconds):.1f}")


# -- b: secure sums -----------------------------------------------------------------------------


def secure_sums(path: str | None, quick: bool) -> None:
    table("b) 8 clients x 8 pictures, ViT-Ti/16 at 160", "exact sum, dB", "2^-24, dB", "says")
    images = load_pictures(path, 160)
    weights = fresh_weights(TINY, images)
    for words, name, params in (
        ("fishing", "fishing", {"target": 0}),
        ("fishing, row of 1", "fishing", {"target": 0, "row": 1.0}),
        ("inconsistent + fishing", "inconsistent", {"lure": {"name": "fishing", "target": 0}}),
    ):
        cells: dict[int, list[float]] = {40: [], 24: []}
        says = ""
        for trial in range(1 if quick else 4):
            rows = torch.randperm(len(images), generator=_coin(trial))[:64]
            labels = torch.arange(1, 65)
            labels[11] = 0  # the picture that is fished for, of client 1
            clients = [
                [(images[r], y)] for r, y in zip(rows.split(8), labels.split(8), strict=True)
            ]
            victim = {"victim": 1} if name == "inconsistent" else {}
            manoeuvre = create_manoeuvre(name, **params, **victim)
            train = TrainSpec(batch_size=8, mode="eval")
            server = Server(manoeuvre, TINY, 160, len(images), train, weights, sums=True)
            seen = server.round(clients)[1]
            isolated = manoeuvre.isolate(seen)
            assert isolated is not None
            says = isolated.words
            result = server.solved(seen, isolated, snap=False)
            cells[24].append(best_match(result, images[rows[11]][None]))
            if not cells[40]:
                cells[40].append(_exact(server, clients, images[rows[11]]))
        row(words, spread(cells[40]), spread(cells[24]), says)


def _exact(server: Server, clients: Sequence[Sequence[Batch]], truth: Tensor) -> float:
    """The same round, with a sum in float64 that is rounded nowhere."""
    cohort = range(len(clients))
    sent = [server.sent(1, client, cohort) for client in cohort]
    received = [{**server.weights, **tampered.changed} for tampered in sent]
    updates = [server._answer(w, b) for w, b in zip(received, clients, strict=True)]
    mean = _fixed_point_mean(updates, bits=60)
    seen = Sighting(
        1, 1, received[1], mean, sent[1].about, server.factory, server.public, 8 * len(clients)
    )
    isolated = server.manoeuvre.isolate(seen)
    assert isolated is not None
    return best_match(server.solved(seen, isolated, snap=False), truth[None])


# -- c: one class -------------------------------------------------------------------------------


def one_class(path: str | None, quick: bool) -> None:
    images = load_pictures(path, 160)
    weights = fresh_weights(TINY, images[:100])
    table(
        "c) 16 pictures of one class, ViT-Ti/16 at 160",
        "rounds or clients",
        ">= 40 dB",
        "claims of one",
        "of them below 30 dB",
        "unclaimed, but >= 40 dB",
        "median dB of claims",
    )
    for words, threshold, upload in (
        ("one round, surrogate", "surrogate", Upload.GRADIENT),
        ("one round, blind", "blind", Upload.GRADIENT),
        ("one round, surrogate, one SGD step", "surrogate", Upload.DELTA),
    ):
        tally = Tally()
        for trial in range(4 if quick else 20):
            rows = torch.randperm(len(images), generator=_coin(trial))
            server = _gated(threshold, upload, weights, images[rows[16:112]])
            batch = (images[rows[:16]], torch.full((16,), 5))
            _gated_round(server, batch, trial + 1, tally)
        tally.print(words)
    for words, threshold, upload, last in (
        ("up to 3 rounds, the batch kept, blind start", "auto", Upload.GRADIENT, 3),
        ("up to 8 rounds of one SGD step, the batch kept", "auto", Upload.DELTA, 8),
    ):
        tally = Tally()
        for trial in range(3 if quick else 10):
            rows = torch.randperm(len(images), generator=_coin(100 + trial))
            server = _gated(threshold, upload, weights, None)
            batch = (images[rows[:16]], torch.full((16,), 5))
            for round_ in range(1, last + 1):
                client = Tally()
                _gated_round(server, batch, 10 * trial + round_, client)
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

    def print(self, words: str) -> None:
        both = self.claimed + self.unclaimed
        good = sum(db >= 40 for db in both)
        row(
            words,
            len(both),
            f"{good} ({100 * good / len(both):.0f} %)",
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


def _gated_round(server: Server, batch: Batch, round_: int, tally: Tally) -> None:
    (seen,) = server.round([[batch]], round_)
    isolated = server.manoeuvre.isolate(seen)
    assert isolated is not None
    if isolated.pictures == 0:
        tally.unclaimed.append(0.0)
        return
    single = replace(isolated, pictures=1)
    near = best_match(server.solved(seen, single, snap=False), batch[0])
    (tally.claimed if isolated.pictures == 1 else tally.unclaimed).append(near)


# -- d: local steps -----------------------------------------------------------------------------


def local_steps(path: str | None, quick: bool) -> None:
    table("d) SGD, lr .01, batch 8, ViT-Ti/16 at 160", "clients", "dB, median (range)", "loss")
    images = load_pictures(path, 160)
    weights = fresh_weights(TINY, images)
    for steps in (5, 20):
        for words, again in (("the same batch", True), ("new batches", False)):
            found, losses = [], []
            for trial in range(1 if quick else 3):
                rows = torch.randperm(len(images), generator=_coin(trial))
                rows = rows[:8].repeat(steps) if again else rows[: 8 * steps]
                at = trial if again else 8 * (steps // 2) + trial
                train = TrainSpec(
                    batch_size=8, local_steps=steps, lr=0.01, upload=Upload.DELTA, mode="eval"
                )
                fishing = create_manoeuvre("fishing", target=int(rows[at]))
                server = Server(fishing, TINY, 160, len(images), train, weights)
                (seen,) = server.round([[(images[r], r) for r in rows.split(8)]])
                isolated = fishing.isolate(seen)
                assert isolated is not None
                result = server.solved(seen, replace(isolated, pictures=1), snap=False)
                found.append(best_match(result, images[rows[at]][None]))
                losses.append(seen.update.loss)
            row(f"{steps} steps, {words}", len(found), spread(found), f"{max(losses):.0f}")


# -- e: a ResNet --------------------------------------------------------------------------------


def resnet(path: str | None, quick: bool) -> None:
    table("e) resnet18 at 32 px, batch 16, inverting_gradients", "batches", "dB, mean +- 95 %")
    images = load_pictures(path, 32)
    weights = fresh_weights(RESNET, images, steps=30, mode="train")
    budget = {"steps": 60 if quick else 300}
    count = 2 if quick else 4
    cases: list[tuple[str, Literal["train", "eval"], bool]] = [
        ("without fishing, the same picture", "eval", False),
        ("fished", "eval", True),
        ("fished, BatchNorm in train mode", "train", True),
    ]
    for words, mode, fished in cases:
        found = []
        for trial in range(count):
            rows = torch.randperm(len(images), generator=_coin(trial))[:16]
            train = TrainSpec(batch_size=16, mode=mode)
            fishing = create_manoeuvre("fishing", target=int(rows[0]))
            server = Server(fishing, RESNET, 32, len(images), train, weights)
            if fished:
                (seen,) = server.round([[(images[rows], rows)]])
                isolated = fishing.isolate(seen)
                assert isolated is not None
                server.public = replace(
                    server.public, protocol=replace(server.public.protocol, mode="eval")
                )
                result = server.solved(seen, isolated, "inverting_gradients", **budget)
                found.append(best_match(result, images[rows[0]][None]))
            else:
                update = server._answer(weights, [(images[rows], rows)])
                seen = Sighting(1, 0, weights, update, {}, server.factory, server.public, len(rows))
                whole = Isolated(update, len(rows), rows)
                result = server.solved(seen, whole, "inverting_gradients", **budget)
                found.append(best_match(result[:1], images[rows[0]][None]))
        half = 1.96 * statistics.stdev(found) / len(found) ** 0.5
        row(words, len(found), f"{statistics.mean(found):.1f} +- {half:.1f}")


PARTS = {"a": one_of_64, "b": secure_sums, "c": one_class, "d": local_steps, "e": resnet}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", help="a tree of class/picture")
    parser.add_argument("--parts", default="abcde")
    parser.add_argument("--quick", action="store_true", help="few trials, to see that it runs")
    options = parser.parse_args()
    for part in options.parts:
        PARTS[part](options.path, options.quick)


if __name__ == "__main__":
    main()

"""Labels and their counts from weight deltas of several local epochs.

    python -m experiments.epochs --path CIFAR10 [--clients 8] [--epochs 1 2 3 5] [--way all head]

Every client has 32 pictures of CIFAR-10's test split and goes over them in batches of 8, in an
order of its own in every epoch. Printed is the share of labels that are right, as a multiset, for
SGD, Adam and AdamW, on the small ViT of the tables as it begins and as it was trained on the train
split (`experiments/checkpoints`); beside it what a guesser reaches that names every class alike.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from experiments.training.cifar10 import CHECKPOINTS, CLASSES, NETWORKS, SIDE, pictures
from fedsim.attacks.labels import recover_labels
from fedsim.core.epochs import epoch_rows
from fedsim.core.learning import Protocol, local_update
from fedsim.core.models import build_model
from fedsim.core.optimizers import OptimizerName
from fedsim.core.spec import Upload
from fedsim.core.trainable import restricted

SHARD, BATCH = 32, 8
RATES: dict[OptimizerName, float] = {"sgd": 0.05, "adam": 0.001, "adamw": 0.001}
UNEVEN = 0.5  # concentration of the classes in a shard


def network(trained: bool, way: str) -> nn.Module:
    kind = NETWORKS["vit8-small"].model
    model = build_model(kind, image_size=SIDE, num_classes=CLASSES, seed=0)
    if trained:
        model.load_state_dict(load_file(CHECKPOINTS / "vit8-small.safetensors"))
    return restricted(model, way)


def shards(path: str, clients: int) -> list[tuple[Tensor, Tensor]]:
    """For each client pictures in [0, 1] with their labels, of unevenly many classes."""
    images, labels = pictures(path, "test")
    coin = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    chosen = []
    for _ in range(clients):
        shares = torch.distributions.Dirichlet(torch.full((CLASSES,), UNEVEN)).sample()
        classes = torch.multinomial(shares + 1e-9, SHARD, True, generator=coin)
        rows = []
        for label in classes.tolist():
            own = torch.nonzero(labels == label)[:, 0]
            rows.append(int(own[torch.randint(len(own), (1,), generator=coin)]))
        chosen.append((images[rows].float() / 255, labels[rows]))
    return chosen


def batches(images: Tensor, labels: Tensor, epochs: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    coin = torch.Generator().manual_seed(seed)
    taken = []
    for _ in range(epochs):
        order = torch.randperm(SHARD, generator=coin)
        taken += [
            (images[order[list(r)]], labels[order[list(r)]]) for r in epoch_rows(SHARD, BATCH)
        ]
    return taken


def overlap(found: Sequence[int], true: Sequence[int]) -> float:
    """The share of labels that are right, each counted as often as it is there."""
    return (Counter(found) & Counter(true)).total() / len(true)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", required=True, help="CIFAR-10: a tree, its batches or its zips")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--way", nargs="+", default=["all", "head"])
    asked = parser.parse_args()
    held = shards(asked.path, asked.clients)
    even = [label % CLASSES for label in range(SHARD)]
    guess = sum(overlap(even, labels.tolist()) for _, labels in held) / len(held)
    print(f"shards of {SHARD}, batches of {BATCH}; every class alike: {guess:.0%}")
    heads = " | ".join(f"{n} epochs" for n in asked.epochs)
    print(f"\n| network | trained | optimiser | {heads} |\n|{'---|' * (3 + len(asked.epochs))}")
    for way in asked.way:
        for trained in (False, True):
            model = network(trained, way)
            for optimizer, rate in RATES.items():
                cells = []
                for epochs in asked.epochs:
                    right = []
                    for client, (images, labels) in enumerate(held):
                        protocol = Protocol(
                            Upload.DELTA, optimizer, rate, mean=(0.5,) * 3, std=(0.5,) * 3
                        )
                        taken = batches(images, labels, epochs, client)
                        update = local_update(model, taken, protocol)
                        found = recover_labels(
                            update, model, SHARD,
                            protocol=protocol, steps=len(taken), epochs=epochs,
                        )  # fmt: skip
                        right.append(overlap(found.tolist(), labels.tolist()))
                    cells.append(f"{sum(right) / len(right):.0%}")
                begun = "trained" if trained else "fresh"
                print(f"| {begun} | {way} | {optimizer} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""Vulnerable population: does a large gradient mean a leaky client?

    python -m experiments.vulnerable pick --path CIFAR10 -o DIR [--among 4000] [--each 4]
    python -m experiments.vulnerable ranks RUN

``pick`` does as GradInversion's authors: of so many pictures, those of each class whose gradient is
the largest on the trained ResNet of the tables (DIR/largest), and as many at random (DIR/random);
audits of the two are then compared. ``ranks``: for every attack of a finished audit, the rank
correlation (Spearman) between the norm of each update, which the server sees, and how well it was
reconstructed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from PIL import Image
from rich.progress import track
from safetensors.torch import load_file
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.training.cifar10 import CHECKPOINTS, CLASSES, NETWORKS, SIDE, normal, pictures
from fedsim.core.models import build_model
from fedsim.core.observation import read_observation
from fedsim.core.run import Run, observation_path


def gradient_norms(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The norm of the gradient that each picture alone would upload, the statistics fixed."""
    norms = []
    for row in track(range(len(labels)), description="gradients"):
        loss = F.cross_entropy(model(normal(images[row : row + 1])), labels[row : row + 1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norms.append(torch.stack([g.norm() for g in gradients]).norm())
    return torch.stack(norms)


def pick(path: str, root: Path, among: int, each: int) -> None:
    """Trees of class/picture: those of the largest gradients, and as many at random."""
    network = NETWORKS["resnet"]
    model = build_model(network.model, image_size=SIDE, num_classes=CLASSES, seed=0).eval()
    model.load_state_dict(load_file(CHECKPOINTS / "resnet.safetensors"))
    images, labels = pictures(path, "train")
    coin = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(labels), generator=coin)[:among]
    images, labels = images[rows], labels[rows]
    norms = gradient_norms(model, images, labels)
    for label in range(CLASSES):
        own = torch.nonzero(labels == label)[:, 0]
        largest = own[norms[own].argsort(descending=True)[:each]]
        random = own[torch.randperm(len(own), generator=coin)[:each]]
        for name, chosen in (("largest", largest), ("random", random)):
            folder = root / name / f"class-{label}"
            folder.mkdir(parents=True, exist_ok=True)
            for row in chosen.tolist():
                Image.fromarray(images[row].permute(1, 2, 0).numpy()).save(
                    folder / f"{int(rows[row]):05d}.png"
                )
    print(f"median norm {norms.median():.3g}; wrote {root / 'largest'} and {root / 'random'}")


def print_ranks(run: Run) -> None:
    scores = run.scores
    norms = {}
    for round_, client in scores[["round", "client"]].drop_duplicates().itertuples(index=False):
        update = read_observation(observation_path(run.observations, round_, client)).update
        norms[round_, client] = sum(float(t.square().sum()) for t in update.tensors.values()) ** 0.5
    print("| attack | PSNR | p | SSIM | p | updates |\n|---|---|---|---|---|---|")
    for attack, rows in scores.groupby("attack", sort=False):
        means = rows.groupby(["round", "client"])[["psnr", "ssim"]].mean()
        sizes = [norms[key] for key in means.index]
        cells = []
        for column in ("psnr", "ssim"):
            rank, chance = spearmanr(sizes, means[column])
            cells += [f"{rank:+.2f}", f"{chance:.2f}"]
        print(f"| {attack} | {' | '.join(cells)} | {len(means)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    picking = commands.add_parser("pick")
    picking.add_argument("--path", required=True, help="CIFAR-10: a tree, its batches or its zips")
    picking.add_argument("-o", "--output", type=Path, required=True)
    picking.add_argument("--among", type=int, default=4000)
    picking.add_argument("--each", type=int, default=4, help="pictures of each class")
    commands.add_parser("ranks").add_argument("run", type=Path)
    asked = parser.parse_args()
    if asked.command == "ranks":
        print_ranks(Run(asked.run))
    else:
        pick(asked.path, asked.output, asked.among, asked.each)


if __name__ == "__main__":
    main()

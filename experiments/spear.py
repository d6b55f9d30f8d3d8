"""Whole batches from the gradient of one linear layer before a ReLU: how exactly, and how fast.

    python -m experiments.spear [--data PICTURES] [--seeds 5]

Untrained MLPs of 800 hidden units on 32 px pictures (3072-800), threat model C, float32 updates. A
seed draws the weights, the pictures and the labels. PICTURES is a tree of class/picture; without
it, the photos that come with scikit-image. PSNR in dB, an exact copy is 160; ``raw`` is the solve
itself, without the move onto the 8-bit grid. A picture that was not found counts with its nearest;
labels count among those found.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fedsim.attacks import create_attack
from fedsim.clients.data import load_images
from fedsim.clients.data.pictures import ImageSet
from fedsim.core.attack import Reconstruction, no_progress
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import THREATS, Announced, Desk, View
from fedsim.core.learning import local_update
from fedsim.core.metrics import psnr
from fedsim.core.models import build_model
from fedsim.core.observation import Observation, Public
from fedsim.core.spec import DataSpec, ModelSpec, Spec, TrainSpec, Upload

SIDE = 32
CPU = torch.device("cpu")
DELTA = TrainSpec(upload=Upload.DELTA, local_steps=1, lr=0.05)


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    classes: int = 10
    hidden: tuple[int, ...] = (800,)
    train: TrainSpec = field(default_factory=TrainSpec)
    noise: float = 0.0  # relative to each tensor's root mean square


CASES = [
    *(Case("gradient", batch) for batch in (1, 4, 8, 16, 24, 32)),
    Case("100 classes", 16, classes=100),
    Case("2 classes", 8, classes=2),
    Case("2 classes", 16, classes=2),
    Case("three hidden layers, 800-400-200", 16, hidden=(800, 400, 200)),
    Case("200 hidden units", 16, hidden=(200,)),
    Case("weight delta of one SGD step", 16, train=DELTA),
    Case("noise 1e-3", 4, noise=1e-3),
    Case("noise 1e-2", 4, noise=1e-2),
    Case("noise 1e-1", 4, noise=1e-1),
]


@dataclass(frozen=True)
class Outcome:
    """Of one batch: the PSNR of each picture, raw and after the move onto the grid, how many came
    back, labels read right, seconds."""

    raw: Tensor
    moved: Tensor
    found: int
    labels: int
    seconds: float


def attacked(case: Case, pictures: ImageSet, seed: int) -> Outcome:
    """One batch through a client and back."""
    coin = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(pictures), generator=coin)[: case.batch].tolist()
    images = torch.stack([pictures.image(row) for row in rows])
    labels = torch.randint(0, case.classes, (case.batch,), generator=coin)
    model = ModelSpec(name="mlp", options={"hidden": list(case.hidden)})
    train = case.train.model_copy(update={"batch_size": case.batch})
    public = Public.of(Spec(data=DataSpec(image_size=SIDE), model=model, train=train), case.classes)
    fresh = partial(build_model, model, image_size=SIDE, num_classes=case.classes, seed=seed)
    net = fresh()
    update = local_update(net, [(images, labels)], public.protocol)
    for tensor in update.tensors.values():
        size = case.noise * tensor.square().mean().sqrt()
        tensor += size * torch.randn(tensor.shape, generator=coin)
    observation = Observation(1, 0, net.state_dict(), update, public)

    def solved(**params: bool) -> Reconstruction:
        view = View(observation, THREATS["C"].grants, Announced(fresh), desk=Desk(seed))
        return create_attack("spear", **params).reconstruct(view, device=CPU, progress=no_progress)

    begun = time.perf_counter()
    try:
        moved = solved()
        seconds = time.perf_counter() - begun
        raw = solved(snap=False)
    except AttackError:
        nothing = torch.full((case.batch,), torch.nan)
        return Outcome(nothing, nothing, 0, 0, time.perf_counter() - begun)
    against = torch.stack([psnr(i[None].expand_as(raw.images), raw.images) for i in images])
    nearest = against.argmax(1)
    assert raw.labels is not None
    right = int((raw.labels == labels[against.argmax(0)]).sum())
    psnr_moved = psnr(images, moved.images[nearest])
    return Outcome(against.amax(1), psnr_moved, len(raw.images), right, seconds)


def table(data: DataSpec, seeds: int) -> None:
    pictures = load_images(data.model_copy(update={"image_size": SIDE}), "train")
    print("| update | batch | found | worst raw | mean raw | worst | mean | labels | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        runs = [attacked(case, pictures, seed) for seed in range(seeds)]
        raw, moved = (torch.cat([getattr(run, of) for run in runs]) for of in ("raw", "moved"))
        seconds = [run.seconds for run in runs]
        whole = seeds * case.batch
        print(
            f"| {case.name} | {case.batch} | {sum(r.found for r in runs)}/{whole} "
            f"| {_of(raw, 'min')} | {_of(raw, 'mean')} | {_of(moved, 'min')} | {_of(moved, 'mean')}"
            f" | {sum(r.labels for r in runs)}/{whole} "
            f"| {statistics.mean(seconds):.1f} (most {max(seconds):.1f}) |",
            flush=True,
        )


def _of(values: Tensor, what: str) -> str:
    """A number over the pictures of batches that were not declined."""
    there = values[~values.isnan()]
    return f"{float(getattr(there, what)()):.1f}" if len(there) else "declined"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", help="a tree of class/picture")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    data = DataSpec()
    if options.data:
        data = DataSpec(name="imagefolder", path=options.data)
    table(data, options.seeds)


if __name__ == "__main__":
    main()

"""The picture of the README: what one round gives a server that chooses the weights.

    python -m experiments.active.pictures [-o docs/active.png]

Above, a batch of eight photographs of one class, and what the imprint read of their one gradient
(ViT-B/16 at 224). Below, a batch of 64, one of them of a class of its own, and that one as the
server gets it: with honest weights, and with one head changed (ViT-Ti/16 at 160). The photographs
are those in scikit-image's wheel.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from experiments.active.server import Server
from fedsim.attacks.manoeuvres import create_manoeuvre
from fedsim.clients.data import load_images
from fedsim.core.metrics import match_order, psnr
from fedsim.core.models import build_model
from fedsim.core.spec import DataSpec, ModelSpec, TrainSpec

CLASSES, ONE = 8, 3  # the class that is imprinted, and the one that is fished for


def photographs(side: int) -> tuple[Tensor, Tensor]:
    images = load_images(DataSpec(image_size=side), "train")
    pictures = torch.stack([images.image(row) for row in range(len(images))])
    return pictures, torch.tensor(images.labels)


def fresh(model: ModelSpec, side: int) -> dict[str, Tensor]:
    net = build_model(model, image_size=side, num_classes=CLASSES, seed=0)
    return dict(net.state_dict())


def imprinted() -> tuple[Tensor, Tensor]:
    """Eight pictures of one class, and what came back of each."""
    pictures, labels = photographs(224)
    own = pictures[labels == 0][::8]
    model = ModelSpec(name="vit_base_patch16_224")
    weights = fresh(model, 224)
    manoeuvre = create_manoeuvre("imprint")
    server = Server(manoeuvre, model, 224, CLASSES, TrainSpec(batch_size=8), weights)
    (seen,) = server.round([[(own, torch.zeros(8).long())]])
    found = server.read(seen, "imprint")
    order = match_order(own, found)
    return own, torch.stack([found[row] for row in order])


def fished() -> tuple[Tensor, int, Tensor, Tensor]:
    """A batch, which of it is fished for, and what is read with honest and with chosen weights."""
    pictures, labels = photographs(160)
    others = torch.nonzero(labels != ONE).flatten()
    coin = torch.Generator().manual_seed(0)
    rows = others[torch.randperm(len(others), generator=coin)[:64]].clone()
    target = 27
    rows[target] = torch.nonzero(labels == ONE).flatten()[5]
    batch = (pictures[rows], labels[rows])
    model = ModelSpec()
    weights = fresh(model, 160)
    train = TrainSpec(batch_size=64)
    manoeuvre = create_manoeuvre("fishing", target=ONE)
    server = Server(manoeuvre, model, 160, CLASSES, train, weights)
    (seen,) = server.round([[batch]])
    blend = server.solved(*server.honest(batch))[:1]
    return batch[0], target, blend, server.solved(seen, server.isolated(seen))


def draw(path: Path) -> None:
    figure = Figure(figsize=(11, 7.4), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subfigures(2, 1, height_ratios=[1, 1.25])  # type: ignore[misc]
    truth, found = imprinted()
    scores = [float(psnr(t[None], f[None])) for t, f in zip(truth, found, strict=True)]
    grid = above.subplots(2, 8)
    for column, (original, copy) in enumerate(zip(truth, found, strict=True)):
        _show(grid[0][column], original)
        _show(grid[1][column], copy, f"{scores[column]:.0f} dB")
    grid[0][0].set_ylabel("batch of one class")
    grid[1][0].set_ylabel("read from one gradient")
    above.suptitle("Whole batches: a stock ViT-B/16 whose weights the server chose", fontsize=11)
    batch, target, blend, alone = fished()
    left, middle, right = below.subplots(1, 3)
    mosaic = torch.cat([torch.cat(list(row), 2) for row in batch.view(8, 8, *batch.shape[1:])], 1)
    _show(left, mosaic, "batch of 64")
    side = batch.shape[-1]
    corner = ((target % 8) * side, (target // 8) * side)
    left.add_patch(_frame(corner, side))
    clear = float(psnr(batch[target][None], alone[:1]))
    lost = float(psnr(batch[target][None], blend))
    _show(middle, blend[0], f"honest weights: {lost:.0f} dB")
    _show(right, alone[0], f"one head changed: {clear:.0f} dB")
    below.suptitle("One of 64: only the classifier's weights changed", fontsize=11)
    figure.savefig(path, dpi=110)
    print(f"imprint: {min(scores):.1f} to {max(scores):.1f} dB; fished: {clear:.1f} dB, {lost:.1f}")
    print(path)


def _show(axes: Axes, picture: Tensor, title: str = "") -> None:
    axes.imshow(picture.clamp(0, 1).permute(1, 2, 0).numpy())
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, fontsize=9)


def _frame(corner: tuple[int, int], side: int) -> Rectangle:
    return Rectangle(corner, side, side, fill=False, edgecolor="#a8261b", lw=3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/active.png"))
    draw(parser.parse_args().output)

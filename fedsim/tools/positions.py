"""Positions of a ViT: what their embeddings hold, and how much the model leans on them.

The measures of the MJP paper (Liu et al. 2022):

- explained variance and accumulated eigenvalues of the position embedding;
- the error of reading a patch's place from its embedding by linear regression, in five folds: in
  patches along the sequence (1-D), and in the grid with sides of length one (2-D);
- Diff-norm: how far the features of a picture move when a part of its patches is shuffled (the
  norm itself; the paper's formula squares it); Consistency: how often the prediction stays;
- accuracy when patches are shuffled, by masking ratio.

A model trained with MJP is told which places are unknown, as in its training.
"""

from __future__ import annotations

import importlib.util
import io
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

from fedsim.audit.trust import named_in, refuse_strangers
from fedsim.clients import images_of
from fedsim.core.anatomy import head_names, tensor_of, vit_parts
from fedsim.core.errors import RunError
from fedsim.core.files import read_tensors, write_atomically, write_json
from fedsim.core.learning import Protocol
from fedsim.core.models import build_architecture
from fedsim.core.run import Run
from fedsim.core.spec import Spec
from fedsim.defenses.applied import declared, prepared
from fedsim.defenses.jigsaw import block_mask, rearrange, shuffled_order
from fedsim.defenses.mjp import Puzzle, coordinates
from fedsim.federation.checkpoint import split

RATIOS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
DIMENSIONS = (1, 2, 3, 4, 5, 6, 7)
FOLDS = 5


@dataclass(frozen=True)
class Findings:
    """What was measured; lists go with ``ratios`` or ``dimensions``."""

    grid: tuple[int, int]
    dimensions: tuple[int, ...]
    explained_variance: list[float]
    eigenvalues: list[float]  # accumulated, as a share of all
    mae_1d: float
    mae_2d: float
    ratios: tuple[float, ...]
    diff_norm: list[float]
    consistency: list[float]
    accuracy: list[float]
    pictures: int


def analyse(
    source: Path, output: Path | None = None, *, pictures: int = 256, trust: bool = False
) -> Findings:
    """Measure the model a run ended with; numbers, and a picture of the positions, go to ``output``
    (the run's folder ``positions`` by default). ``trust``: what the run names by import path may be
    imported."""
    run = Run.open(source if source.is_dir() else source.parent)
    refuse_strangers(run.root, named_in(run), trust=trust)
    model = load_final_model(run, source if source.is_file() else None)
    spec = run.spec
    parts = vit_parts(model)
    if parts.position is None:
        raise RunError("the model has no position embedding to look at.")
    rows = parts.rows_of(tensor_of(model, parts.position).detach().double())
    shares = explained_variance(rows)
    shuffled = [shuffling(model, spec, parts.grid, ratio, pictures) for ratio in RATIOS]
    findings = Findings(
        parts.grid,
        DIMENSIONS,
        [float(shares[:k].sum()) for k in DIMENSIONS],
        [float(share) for share in shares.cumsum(0)[:16]],
        regression_error(rows, torch.arange(len(rows), dtype=torch.float64)[:, None]),
        regression_error(rows, _within_one(coordinates(parts.grid).double())),
        RATIOS,
        [apart for apart, _, _ in shuffled],
        [same for _, same, _ in shuffled],
        [right for _, _, right in shuffled],
        min(pictures, len(images_of(spec.data, "test"))),
    )
    folder = output or run.positions
    write_json(folder / "positions.json", asdict(findings))
    centred = rows - rows.mean(0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    axes = ("first principal direction", "second")
    draw_points((centred @ directions[:2].T).numpy(), parts.grid, axes, folder / "positions.png")
    if importlib.util.find_spec("umap") is not None:
        flat = umap_projection(rows.numpy())
        draw_points(flat, parts.grid, ("UMAP, first axis", "second"), folder / "umap.png")
    return findings


def umap_projection(rows: np.ndarray) -> np.ndarray:
    """The embeddings in the plane, neighbours kept together (the paper's Figure 7)."""
    import umap

    with warnings.catch_warnings():  # about a seed that means one thread
        warnings.simplefilter("ignore")
        reducer = umap.UMAP(n_neighbors=min(15, len(rows) - 1), random_state=0, init="pca")
        return np.asarray(reducer.fit_transform(rows))


def explained_variance(rows: Tensor) -> Tensor:
    """The share of the variance along each principal direction, largest first."""
    squares = torch.linalg.svdvals(rows - rows.mean(0)).square()
    return squares / squares.sum().clamp(min=1e-300)


def _within_one(places: Tensor) -> Tensor:
    """Rows and columns as shares of the picture's side, so that grids compare."""
    return places / places.amax(0).clamp(min=1)


def regression_error(rows: Tensor, places: Tensor) -> float:
    """Mean absolute error of places read from embeddings by least squares, over folds held out."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    errors = []
    for fold in range(FOLDS):
        held_out = order[fold::FOLDS]
        rest = torch.tensor([i for i in order.tolist() if i not in set(held_out.tolist())])
        mean, centre = rows[rest].mean(0), places[rest].mean(0)
        solved = torch.linalg.lstsq(
            rows[rest] - mean, places[rest] - centre, driver="gelsd", rcond=1e-6
        ).solution
        estimates = (rows[held_out] - mean) @ solved + centre
        errors.append((estimates - places[held_out]).abs())
    return float(torch.cat(errors).mean())


def shuffling(
    model: nn.Module, spec: Spec, grid: tuple[int, int], ratio: float, count: int
) -> tuple[float, float, float]:
    """Diff-norm, Consistency and accuracy on so many test pictures from all over their list, a
    share of their patches shuffled."""
    images = images_of(spec.data, "test")
    protocol = Protocol.of(spec.train, spec.data)
    rng = torch.Generator().manual_seed(0)
    apart, same, right, total = 0.0, 0, 0, 0
    with torch.no_grad():
        for row in _spread(len(images), count):
            picture = images.image(row)[None]
            mask = order = None
            moved = picture
            if ratio > 0:
                mask = block_mask(grid, ratio, rng)
                order = shuffled_order(mask, rng)
                moved = rearrange(picture, grid, order)
            before, first = _features_and_class(model, protocol.normalise(picture))
            after, second = _features_and_class(model, protocol.normalise(moved), mask, order)
            apart += float((before - after).norm())
            same += int(first == second)
            right += int(second == int(images.labels[row]))
            total += 1
    return apart / total, same / total, right / total


def _spread(length: int, count: int) -> list[int]:
    """So many rows of a list that may be sorted by class, evenly apart."""
    return sorted({row * length // count for row in range(count)})


def _features_and_class(
    model: nn.Module, picture: Tensor, mask: Tensor | None = None, order: Tensor | None = None
) -> tuple[Tensor, int]:
    """Features before the head and the predicted class; the model is told of the shuffling here
    alone."""
    puzzle = vars(model).get("puzzle")
    features: list[Tensor] = []
    head = model.get_submodule(head_names(model)[0].rpartition(".")[0])
    handle = head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    if isinstance(puzzle, Puzzle):
        puzzle.mask, puzzle.order = mask, order
    try:
        logits = model(picture)
    finally:
        handle.remove()
        if isinstance(puzzle, Puzzle):
            puzzle.mask = puzzle.order = None
    return features[0].flatten(), int(logits.argmax())


def load_final_model(run: Run, file: Path | None = None) -> nn.Module:
    """The model a run ended with, or that of another checkpoint of it, in eval mode."""
    file, spec = file or run.checkpoint, run.spec
    if not file.is_file():
        raise RunError(f"'{run.root}' has no checkpoint yet: its rounds are not done.")
    classes = len(images_of(spec.data, "train").classes)
    model = build_architecture(spec.model, image_size=spec.data.image_size, num_classes=classes)
    model = prepared(model, declared(spec.defenses), spec.train)
    model.load_state_dict(split(read_tensors(file, links=file != run.checkpoint)[0])[0])
    return model.eval()


def draw_points(
    flat: np.ndarray, grid: tuple[int, int], names: tuple[str, str], path: Path
) -> None:
    """Embeddings in the plane, (N, 2), neighbours in the grid joined."""
    points = flat.reshape(*grid, 2)
    figure = Figure(figsize=(5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for lines in (points, np.swapaxes(points, 0, 1)):
        for line in lines:
            axes.plot(line[:, 0], line[:, 1], color="#c9cdd2", lw=0.8, zorder=1)
    shade = np.arange(grid[0] * grid[1])
    across, up = points.reshape(-1, 2).T
    axes.scatter(across, up, c=shade, cmap="viridis", s=22, zorder=2)
    axes.set(xlabel=names[0], ylabel=names[1], aspect="equal")
    axes.spines[["top", "right"]].set_visible(False)
    png = io.BytesIO()
    figure.savefig(png, dpi=140)
    write_atomically(path, png.getvalue())

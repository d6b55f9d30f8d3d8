"""The masked jigsaw puzzle's own tables, on our own federations.

    python -m experiments.mjp variants -o DIR [--seeds 3] [--only PREFIX]... [key=value]...
    python -m experiments.mjp cifar10 -o DIR --path CIFAR10 [--network vit4] [--seeds 3]
        [--only PREFIX]...
    python -m experiments.mjp patches BENCH
    python -m experiments.mjp inputs RUN...

``variants`` trains every variant of the paper's Table 2 and the masking ratios of its Table 3, and
prints accuracy, and Diff-norm and Consistency with half of the patches shuffled, each beside its
difference from plain training with the same seed. ``cifar10`` trains them without a federation, on
all of CIFAR-10, where a ViT learns to use its positions, and adds what the positions hold; networks
that are in DIR, of the same defense, are not trained again. ``--network resnet`` and ``swin`` are
the other backbones of its Table 1, which have no position embedding: only the shuffling is left.
``patches`` splits what attacks made of each picture of a finished bench (experiments/mjp.yaml) into
patches that were shuffled and patches that stayed; the masks are drawn again from the clients'
seeds, which the attacks never see. ``inputs`` holds what was reconstructed in finished audits
against the client's picture and against what its network was shown, as the paper's Table 5 does.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from rich.progress import track
from torch import Tensor, nn

from experiments.table import MEASURES, cell, interval
from experiments.training.cifar10 import (
    CLASSES,
    NETWORKS,
    SIDE,
    accuracy,
    is_saved,
    pictures,
    save,
    train,
)
from fedsim.audit.stages import federate
from fedsim.campaign.plan import jobs_of, victims
from fedsim.core.anatomy import vit_parts
from fedsim.core.errors import ModelError
from fedsim.core.metrics import METRICS, decibel
from fedsim.core.models import build_model
from fedsim.core.observation import read_observation
from fedsim.core.run import Run, observation_path
from fedsim.core.spec import Spec, load_spec
from fedsim.core.vault import Vault
from fedsim.defenses.applied import announced, declared, prepared
from fedsim.defenses.mjp import Mjp, coordinates, puzzle_of
from fedsim.scoring.scores import load_pictures
from fedsim.tools.positions import (
    explained_variance,
    load_final_model,
    regression_error,
    shuffling,
)

TRIED = 1000  # pictures
SHUFFLED = 0.5  # the share of patches at which Diff-norm and Consistency are measured
FEDERATION = [
    "data={name: photos, image_size: 32, clients: 4}",
    "model={name: vit_tiny_patch16_224, options: {patch_size: 4, depth: 4, embed_dim: 96}}",
    "train={rounds: 10, batch_size: 8, upload: delta, local_epochs: 1, lr: 0.03, momentum: 0.9}",
    "attacks=[]",
    "engine={kind: inline}",
]
PLAIN = "A: plain"
OFTEN = "probability: 0.5"
BARE = f"name: mjp, unknown: false, dal: none, {OFTEN}"
VARIANTS = {
    PLAIN: "",
    "B: no positions": "{name: mjp, positions: false, probability: 0}",
    "C: all patches and pixels shuffled": f"{{{BARE}, ratio: 1.0, pixels: true}}",
    "D: localisation alone (MLP)": "{name: mjp, unknown: false, probability: 0}",
    "E: shuffled": f"{{{BARE}}}",
    "F: shuffled, index": f"{{{BARE}, index: true}}",
    "G: shuffled, unknown": f"{{name: mjp, dal: none, {OFTEN}}}",
    "H: G + localisation (PCA)": f"{{name: mjp, dal: pca, {OFTEN}}}",
    "I: G + localisation (linear)": f"{{name: mjp, dal: linear, {OFTEN}}}",
    "J: G + localisation (MLP)": f"{{name: mjp, {OFTEN}}}",
}
RATIOS = {
    f"J, ratio {ratio}": f"{{name: mjp, ratio: {ratio}, {OFTEN}}}" for ratio in (0.3, 0.5, 0.7, 0.9)
}


def chosen_of(only: list[str]) -> dict[str, str]:
    """Plain, and the variants whose names begin with one of ``only``; all without any."""
    return {
        name: defense
        for name, defense in (VARIANTS | RATIOS).items()
        if not only or name == PLAIN or name.startswith(tuple(only))
    }


def train_variants(root: Path, seeds: int, overrides: list[str], only: list[str]) -> pd.DataFrame:
    """A row per variant and seed."""
    rows = []
    chosen = chosen_of(only)
    every = [(name, d, seed) for name, d in chosen.items() for seed in range(seeds)]
    for name, defense, seed in track(every, "federations"):
        spec = load_spec({}, [*FEDERATION, f"seed={seed}", f"defenses=[{defense}]", *overrides])
        run = federate(spec, root / f"{name.partition(':')[0].replace(' ', '-')}-seed-{seed}")
        model = load_final_model(run)
        apart, same, _ = shuffling(model, spec, vit_parts(model).grid, SHUFFLED, TRIED)
        accuracy = float(run.rounds["test_accuracy"].iloc[-1])
        about = {"variant": name, "seed": seed, "accuracy": 100 * accuracy}
        rows.append({**about, "diff-norm": apart, "consistency": 100 * same})
    return pd.DataFrame(rows)


def train_on_cifar10(
    root: Path, path: str, network: str, steps: int, seeds: int, only: list[str]
) -> pd.DataFrame:
    """A row per variant and seed: accuracy, Diff-norm and Consistency at half of the patches, and
    what the positions hold, where there are some."""
    rows = []
    chosen = chosen_of(only)
    every = [(name, d, seed) for seed in range(seeds) for name, d in chosen.items()]
    for name, defense, seed in track(every, "networks"):
        spec = load_spec({"data": {"name": "cifar10", "path": path}}, [f"defenses=[{defense}]"])
        defenses = declared(spec.defenses)
        stem = name.partition(":")[0].replace(" ", "-")
        file = root / network / f"{stem}-seed-{seed}-steps-{steps}.safetensors"
        header = {"variant": name, "defenses": repr(defenses)}
        if not is_saved(file, header):
            shown = pictures(path, "train")
            model = train(NETWORKS[network], *shown, steps=steps, seed=seed, defenses=defenses)
            save(model, file, header)
        begun = NETWORKS[network].model.model_copy(update={"checkpoint": str(file)})
        model = build_model(
            begun, image_size=SIDE, num_classes=CLASSES, seed=seed,
            prepare=partial(prepared, defenses=defenses),
        ).eval()  # fmt: skip
        about = {"variant": name, "seed": seed}
        rows.append(about | measured(model, spec, *pictures(path, "test")))
    return pd.DataFrame(rows)


def measured(model: nn.Module, spec: Spec, images: Tensor, labels: Tensor) -> dict[str, float]:
    """What the paper's Tables 1 to 3 and its Figure 3 measure of a trained network."""
    puzzle = puzzle_of(Mjp(dal="none", unknown=False).prepare_model(copy.deepcopy(model)))
    apart, same, _ = shuffling(model, spec, puzzle.grid, SHUFFLED, TRIED)
    row = {
        "accuracy": 100 * accuracy(model, images, labels),
        "diff-norm": apart,
        "consistency": 100 * same,
    }
    try:
        parts = vit_parts(model)
    except ModelError:
        return row
    if parts.position is None:
        return row
    places = model.get_parameter(parts.position).detach()[0, parts.prefix_tokens :].double()
    return row | {
        "variance in 2 of its directions": 100 * float(explained_variance(places)[:2].sum()),
        "place read to": regression_error(places, coordinates(parts.grid).double()),
    }


def print_variants(table: pd.DataFrame) -> None:
    measures = [name for name in table.columns if name not in ("variant", "seed")]
    plain = table[table["variant"] == PLAIN].set_index("seed")
    print("| variant | " + " | ".join(f"{m} | from plain" for m in measures) + " |")
    print("|---" * (1 + 2 * len(measures)) + "|")
    for name, rows in table.groupby("variant", sort=False):
        cells = []
        for measure in measures:
            values = rows.set_index("seed")[measure]
            digits = 1 if values.abs().mean() > 10 else 2
            apart = interval((values - plain[measure]).dropna().to_numpy(), digits)
            cells += [f"{values.mean():.{digits}f}", apart]
        print(f"| {name} | {' | '.join(cells)} |")


def split_pictures(run: Run) -> Iterator[dict[str, object]]:
    """For every picture that was attacked: PSNR of shuffled patches and of those that stayed."""
    spec = run.spec
    for job in jobs_of(run, spec, victims(spec)):
        pictures = load_pictures(run, job)
        if pictures is None or job.attack.is_baseline:
            continue
        mask = _mask(run, spec, job.round, job.client)
        errors = _patch_errors(pictures.truth, pictures.guess, mask.shape)
        for name, chosen in (("shuffled", mask), ("stayed", ~mask)):
            for value in decibel(errors[:, chosen].mean(1)).tolist():
                yield {"attack": job.label, "client": job.client, "patches": name, "psnr": value}


def _mask(run: Run, spec: Spec, round_: int, client: int) -> Tensor:
    """The mask a client drew, from its own seed."""
    truth = Vault(run.vault).read(round_, client)
    public = read_observation(observation_path(run.observations, round_, client))
    model = announced(public.public)
    rng = truth.coin()
    (defense,) = declared(public.public.defenses)
    defense.at_round(round_, client, spec.cohort(round_)).protect_batch(
        truth.images, truth.labels, model, rng
    )
    puzzle = puzzle_of(model)
    assert puzzle.mask is not None
    return puzzle.mask.view(puzzle.grid)


def shown_pictures(run: Run, spec: Spec, round_: int, client: int) -> Tensor:
    """A client's pictures as its network was shown them."""
    truth = Vault(run.vault).read(round_, client)
    public = read_observation(observation_path(run.observations, round_, client)).public
    model, images, rng = announced(public), truth.images, truth.coin()
    for defense in declared(public.defenses):
        defense = defense.at_round(round_, client, spec.cohort(round_))
        images, _ = defense.protect_batch(images, truth.labels, model, rng)
    return images


def print_inputs(runs: list[Run]) -> None:
    """PSNR, SSIM, LPIPS and FFT2D of reconstructions against the picture and against the input."""
    titles = [METRICS[name].title for name in MEASURES]
    print("| run | attack | against | " + " | ".join(titles) + " |")
    print("|---|---|---|" + "---|" * len(titles))
    for run in runs:
        rows = []
        for job in jobs_of(run, run.spec, victims(run.spec)):
            pictures = load_pictures(run, job)
            if pictures is None:
                continue
            inputs = shown_pictures(run, run.spec, job.round, job.client)
            for against, truth in (("the picture", pictures.truth), ("the input", inputs)):
                row: dict[str, object] = {"attack": job.label, "against": against}
                for name, measure in MEASURES.items():
                    values = measure(truth, pictures.guess)
                    row[name] = float("nan") if values is None else float(values.mean())
                rows.append(row)
        table = pd.DataFrame(rows)
        for about, some in table.groupby(["attack", "against"], sort=False):
            cells = [*map(str, about), *(cell(some[name]) for name in MEASURES)]
            print(f"| {run.spec.name} | {' | '.join(cells)} |")


def _patch_errors(truth: Tensor, guess: Tensor, grid: torch.Size) -> Tensor:
    """The squared error of every patch, (B, rows, columns)."""
    side = truth.shape[-1] // grid[0]
    return torch.nn.functional.avg_pool2d((truth - guess).square().mean(1, keepdim=True), side)[
        :, 0
    ]


def print_patches(root: Path) -> None:
    print("| cell | attack | shuffled patches, dB | patches that stayed, dB |")
    print("|---|---|---|---|")
    for folder in sorted((root / "cells").iterdir()):
        run = Run(folder)
        if [defense.name for defense in run.spec.defenses] != ["mjp"]:
            continue
        table = pd.DataFrame(split_pictures(run))
        for attack, rows in table.groupby("attack", sort=False):
            cells = [
                interval(
                    rows[rows["patches"] == which].groupby("client")["psnr"].mean().to_numpy(), 1
                )
                for which in ("shuffled", "stayed")
            ]
            print(f"| {run.spec.name} | {attack} | {cells[0]} | {cells[1]} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    variants = commands.add_parser("variants")
    variants.add_argument("-o", "--output", type=Path, required=True)
    variants.add_argument("--seeds", type=int, default=3)
    variants.add_argument("--only", action="append", default=[], metavar="PREFIX")
    variants.add_argument("overrides", nargs="*")
    alone = commands.add_parser("cifar10")
    alone.add_argument("-o", "--output", type=Path, required=True)
    alone.add_argument("--path", required=True)
    alone.add_argument(
        "--network", choices=("vit4", "vit4-plain", "resnet", "swin"), default="vit4"
    )
    alone.add_argument("--steps", type=int, default=2500)
    alone.add_argument("--seeds", type=int, default=3)
    alone.add_argument("--only", action="append", default=[], metavar="PREFIX")
    commands.add_parser("patches").add_argument("bench", type=Path)
    commands.add_parser("inputs").add_argument("runs", type=Path, nargs="+")
    asked = parser.parse_args()
    if asked.command == "inputs":
        print_inputs([Run(path) for path in asked.runs])
        return
    if asked.command == "patches":
        print_patches(asked.bench)
        return
    if asked.command == "cifar10":
        table = train_on_cifar10(
            asked.output, asked.path, asked.network, asked.steps, asked.seeds, asked.only
        )
        print_variants(table)
        return
    print_variants(train_variants(asked.output, asked.seeds, asked.overrides, asked.only))


if __name__ == "__main__":
    main()

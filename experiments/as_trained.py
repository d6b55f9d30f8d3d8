"""Training as people train: what each part of it leaves of a picture, and of a batch's labels.

`python -m experiments.as_trained -o DIR` writes a table of every way of training below: four
clients of one picture each on a small untrained ViT, attacked by the closed form and by matching,
and the labels of four batches of eight. Some minutes on one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.audit.stages import audit
from fedsim.core.run import Run
from fedsim.core.spec import load_spec

BASE = [
    "seed=3",
    "data={image_size: 32, clients: 4}",
    "model={name: vit_tiny_patch16_224, options: {patch_size: 8, depth: 3, embed_dim: 96}}",
    "train={lr: 0.01, evaluate: false}",
    "audit.gallery=0",
    "engine={kind: inline, device: cpu}",
]
STEPS = 200
PICTURES = f"attacks=[{{name: patch_solve}}, {{name: inverting_gradients, steps: {STEPS}}}]"
LABELS = ["attacks=[{name: patch_solve}]", "train.batch_size=8"]

SEVERAL = ["train.upload=delta", "train.local_steps=3"]
CROP = "{name: RandomResizedCrop, scale: [0.5, 1]}"
JITTER = "{name: ColorJitter, brightness: 0.4, contrast: 0.4, saturation: 0.4, hue: 0.1}"
WAYS: dict[str, list[str]] = {
    "plain": [],
    "flip": ["train.augment=[{name: RandomHorizontalFlip, p: 1.0}]"],
    "crop": [f"train.augment=[{CROP}]"],
    "colour jitter": [f"train.augment=[{JITTER}]"],
    "RandAugment": ["train.augment=[{name: RandAugment}]"],
    "crop, flip, RandAugment": [
        f"train.augment=[{CROP}, {{name: RandomHorizontalFlip}}, {{name: RandAugment}}]"
    ],
    "MixUp": ["train.augment=[{name: MixUp, alpha: 0.4}]"],
    "CutMix": ["train.augment=[{name: CutMix}]"],
    "label smoothing 0.1": ["train.loss={label_smoothing: 0.1}"],
    "balanced weights": ["train.loss={weights: balanced}"],
    "two batches accumulated": ["train.accumulate=2"],
    "autocast bfloat16": ["train.precision=bfloat16"],
    "autocast float16": ["train.precision=float16"],
    "uploaded in float16": ["train.upload_dtype=float16"],
    "uploaded in bfloat16": ["train.upload_dtype=bfloat16"],
    "Adam, one step": ["train.upload=delta", "train.optimizer=adam", "train.lr=0.001"],
    "three steps": SEVERAL,
    "three steps, cosine": [*SEVERAL, "train.schedule={name: cosine}"],
    "three steps, FedProx 1": [
        *SEVERAL,
        "train.strategy=FedProx",
        "train.strategy_options={proximal_mu: 1.0}",
    ],
    "three steps, Adam": [*SEVERAL, "train.optimizer=adam", "train.lr=0.001"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--labels-only", action="store_true", help="no matching: seconds a way")
    asked = parser.parse_args()
    rows = [row_of(way, asked.output, labels_only=asked.labels_only) for way in asked.ways]
    table = pd.DataFrame(rows)
    table.to_csv(asked.output / "as_trained.csv", index=False)
    for line in [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]:
        print(f"| {' | '.join(map(str, line))} |")


def row_of(way: str, root: Path, *, labels_only: bool) -> dict[str, Any]:
    """One way of training: pictures of batches of one, labels of batches of eight."""
    name = way.replace(" ", "-").replace(",", "")
    attacks = LABELS[:1] if labels_only else [PICTURES]
    one = audit(load_spec({}, [*BASE, *WAYS[way], *attacks]), root / name / "one", willing=True)
    eight = audit(load_spec({}, [*BASE, *WAYS[way], *LABELS]), root / name / "eight", willing=True)
    row: dict[str, Any] = {"training": way, "canary": _worst_canary(one, eight)}
    for attack in sorted(set(one.scores["attack"]), key=["patch_solve"].count, reverse=True):
        rows = one.scores[one.scores["attack"] == attack]
        row[f"{attack}, seen"] = f"{rows['psnr'].mean():.1f} ({rows['psnr'].max():.1f})"
        if attack == "patch_solve":
            row["original"] = f"{rows['psnr_original'].mean():.1f}"
    row["labels, batch 1"] = _labels(one)
    row["labels, batch 8"] = _labels(eight)
    return row


def _worst_canary(*runs: Run) -> str:
    return f"{max(run.scores['canary'].max() for run in runs):.1e}"


def _labels(run: Run) -> str:
    rows = run.scores[run.scores["attack"] == "patch_solve"]
    return f"{(rows['label_true'] == rows['label_recovered']).mean():.0%}"


if __name__ == "__main__":
    main()

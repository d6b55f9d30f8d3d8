"""Train the small networks of the tables on CIFAR-10, by one recipe and one command.

    python -m experiments.training.cifar10 vit8 --path CIFAR10 [--steps 2500] [-o DIR]

AdamW, one cycle up to 1e-3, batches of 64, random flips. The victims learn from the train split and
are tried on the test split. ``prior`` learns from the test split and is tried on the train split:
no victim's picture is among its own. What comes out is kept in half precision
(``DIR/NAME.safetensors``), its accuracy and the command in the file's own header.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from rich.progress import track
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.clients.data import load_images
from fedsim.core.defense import Defense
from fedsim.core.models import build_model
from fedsim.core.spec import DataSpec, ModelSpec
from fedsim.defenses.applied import prepared

CHECKPOINTS = Path(__file__).parent.parent / "checkpoints"
CLASSES, SIDE, BATCH = 10, 32, 64
PEAK, DECAY = 1e-3, 0.05
SHOWN = 4000  # pictures that the accuracy is taken on, where there are more


@dataclass(frozen=True)
class Network:
    """A model, the split that it learns from and the one that it is tried on."""

    model: ModelSpec
    learns: Literal["train", "test"] = "train"
    tried: Literal["train", "test"] = "test"


def vit(**options: int) -> Network:
    """Begun as older ViT code does: after so few steps it is then several points better."""
    return Network(ModelSpec(name="vit_tiny_patch16_224", init="classic", options=options))


NETWORKS = {
    "vit8": vit(patch_size=8, depth=6),
    "vit8-small": vit(patch_size=8, depth=4, embed_dim=96),
    "vit4": vit(patch_size=4, depth=4, embed_dim=96),
    # with the first block that APRIL's closed form needs
    "vit4-plain": vit(patch_size=4, depth=4, embed_dim=96, plain_first_block=True),
    "swin": Network(
        ModelSpec(
            name="swin_tiny_patch4_window7_224",
            options={
                "window_size": 4,
                "embed_dim": 64,
                "depths": [2, 2],
                "num_heads": [2, 4],
            },
        )
    ),
    "resnet": Network(
        ModelSpec(
            name="resnet18",
            options={
                "layers": [1, 1, 1, 1],
                "channels": [32, 64, 128, 256],
                "output_stride": 8,
            },
        )
    ),
    "prior": Network(
        ModelSpec(
            name="resnet18",
            options={"layers": [1] * 4, "channels": [16, 32, 64, 128], "output_stride": 8},
        ),
        learns="test",
        tried="train",
    ),
}


@cache
def pictures(path: str, split: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
    """All of a split as bytes (N, 3, 32, 32), and the labels."""
    images = load_images(DataSpec(name="cifar10", path=path, image_size=SIDE), split)
    rows = track(range(len(images)), description=f"reading the {split} split")
    bytes_ = [(images.image(row) * 255).round().to(torch.uint8) for row in rows]
    return torch.stack(bytes_), torch.as_tensor(images.labels)


def normal(images: Tensor) -> Tensor:
    """Bytes as clients see them: mean .5, deviation .5 (the default of a spec's data)."""
    return images.float() / 127.5 - 1


def train(
    network: Network, images: Tensor, labels: Tensor, *, steps: int, seed: int = 0,
    defenses: Sequence[Defense] = (), tell: Callable[[int, float], None] = lambda step, loss: None,
) -> nn.Module:  # fmt: skip
    """A network after so many steps, with what these defenses do to its batches and its loss; the
    same seed gives the same network."""
    model = build_model(network.model, image_size=SIDE, num_classes=CLASSES, seed=seed).train()
    model = prepared(model, defenses)
    coin = torch.Generator().manual_seed(seed)  # of the batches, whatever defenses draw
    secret = torch.Generator().manual_seed(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=DECAY)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, total_steps=steps)
    for step in range(steps):
        rows = torch.randint(0, len(labels), (BATCH,), generator=coin)
        flips = torch.rand(BATCH, generator=coin) < 0.5
        batch = normal(images[rows])
        batch = torch.where(flips[:, None, None, None], batch.flip(3), batch)
        classes = labels[rows]
        for defense in defenses:
            batch, classes = defense.protect_batch(batch, classes, model, secret)
        loss = F.cross_entropy(model(batch), classes)
        penalties = [term for d in defenses if (term := d.penalty(model)) is not None]
        loss = torch.stack([loss, *penalties]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cycle.step()
        tell(step, float(loss.detach()))
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of pictures whose class is told, of the first SHOWN in a fixed random order."""
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:SHOWN]
    right = [
        (model(normal(images[some])).argmax(1) == labels[some]).float() for some in rows.split(256)
    ]
    return float(torch.cat(right).mean())


def save(model: nn.Module, path: Path, about: dict[str, str]) -> None:
    """In half precision, with what is to be known of it in the header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".half")
    tensors = {
        name: (t.half() if t.is_floating_point() else t).contiguous()
        for name, t in model.state_dict().items()
    }
    save_file(tensors, half, about)
    half.rename(path)  # whole or not there


def is_saved(path: Path, about: dict[str, str]) -> bool:
    """Whether a network lies there whose header says the same."""
    if not path.is_file():
        return False
    with safe_open(path, "pt") as file:
        return bool(file.metadata() == about)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="+", choices=sorted(NETWORKS))
    parser.add_argument("--path", required=True, help="CIFAR-10: a tree, its batches or its zips")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=CHECKPOINTS)
    asked = parser.parse_args()
    for name in asked.names:
        network = NETWORKS[name]
        began = time.perf_counter()

        def tell(step: int, loss: float, name: str = name, began: float = began) -> None:
            if (step + 1) % 100 == 0:
                seconds = time.perf_counter() - began
                print(
                    f"{name} {step + 1} of {asked.steps}: {loss:.3f}, {seconds:.0f} s", flush=True
                )

        learned = pictures(asked.path, network.learns)
        model = train(network, *learned, steps=asked.steps, seed=asked.seed, tell=tell)
        share = accuracy(model, *pictures(asked.path, network.tried))
        command = f"python -m experiments.training.cifar10 {name} --steps {asked.steps}"
        about = {
            "model": network.model.model_dump_json(exclude_defaults=True),
            "accuracy": f"{share:.4f} on {SHOWN} pictures of the {network.tried} split",
            "command": f"{command} --seed {asked.seed} --path CIFAR10",
        }
        path = asked.output / f"{name}.safetensors"
        save(model, path, about)
        print(f"{path}: {share:.1%} of the {network.tried} split", flush=True)


if __name__ == "__main__":
    main()

"""What the closed forms and the label rules recover, without any tuning and without an oracle.

    python experiments/closed_forms.py [--data PICTURES] [--count 8]

One picture per gradient, untrained timm models, threat model C. PICTURES is a tree of
class/picture; without it, the photos that come with scikit-image. PSNR in dB, an exact copy is 160;
``raw`` is the solve itself, without the move onto the 8-bit grid.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.attacks import create_attack
from fedsim.attacks.labels import recover_labels
from fedsim.clients.data import load_images
from fedsim.core.attack import Reconstruction, no_progress
from fedsim.core.knowledge import THREATS, Announced, Desk, View
from fedsim.core.learning import Protocol, local_update
from fedsim.core.metrics import psnr
from fedsim.core.models import build_model
from fedsim.core.observation import Observation, Public
from fedsim.core.spec import DataSpec, ModelSpec, Spec, TrainSpec, Upload
from fedsim.defenses.frozen_pe import FrozenPE
from fedsim.defenses.sinusoidal_pe import SinusoidalPE

CLASSES = 100
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    name: str
    attack: str
    model: ModelSpec
    side: int
    params: dict[str, Any] = field(default_factory=dict)
    train: TrainSpec = field(default_factory=TrainSpec)
    noise: float = 0.0  # relative to each tensor's root mean square
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    double: bool = False


def vit(name: str = "vit_tiny_patch16_224", **options: Any) -> ModelSpec:
    return ModelSpec(name=name, options=options)


RAW = {"snap": False}
STEPS = TrainSpec(upload=Upload.DELTA, local_steps=5, lr=0.01)
HARD = TrainSpec(
    upload=Upload.DELTA, local_steps=5, lr=0.01, momentum=0.9, clip=1.0, weight_decay=0.05
)
RESNET = ModelSpec(name="resnet18")
SMALL, TINY, P8 = vit("vit_small_patch16_224"), vit(), vit(patch_size=8)
PLAIN = vit(patch_size=4, depth=6, plain_first_block=True)
CASES = [
    Case("S/16 at 224", "patch_solve", SMALL, 224),
    Case("S/16 at 224, raw", "patch_solve", SMALL, 224, RAW),
    Case("Ti/16 at 224 (rank 191 of 196)", "patch_solve", TINY, 224, RAW),
    Case("S/16 at 224, noise 1e-4", "patch_solve", SMALL, 224, RAW, noise=1e-4),
    Case("Ti/16 at 224, noise 1e-4", "patch_solve", TINY, 224, RAW, noise=1e-4),
    Case("32 px p4, noise 1e-4", "patch_solve", vit(patch_size=4), 32, RAW, noise=1e-4),
    Case("S/16 at 224, 5 SGD steps", "patch_solve", SMALL, 224, RAW, STEPS),
    Case("32 px p4, 5 SGD steps", "patch_solve", vit(patch_size=4), 32, RAW, STEPS),
    Case(
        "32 px p4, 5 steps, momentum, clip, decay", "patch_solve", vit(patch_size=4), 32, RAW, HARD
    ),
    Case("64 px p8, frozen random PE", "row_space", P8, 64, prepare=FrozenPE().prepare_model),
    Case("64 px p8, sinusoidal PE", "row_space", P8, 64, prepare=SinusoidalPE().prepare_model),
    Case("Architecture A, 32 px p4, float64", "april_closed", PLAIN, 32, double=True),
    Case("Architecture A, 32 px p4, float32", "april_closed", PLAIN, 32),
]


def attacked(case: Case, image: Tensor, label: Tensor, seed: int) -> Reconstruction:
    """One picture through a client and back."""
    spec = Spec(data=DataSpec(image_size=case.side), model=case.model, train=case.train)
    public = Public.of(spec, CLASSES)

    def fresh() -> nn.Module:
        return case.prepare(
            build_model(case.model, image_size=case.side, num_classes=CLASSES, seed=0)
        )

    net, images = fresh(), image[None]
    if case.double:
        net, images = net.double(), images.double()
    steps = case.train.local_steps or 1
    update = local_update(net, [(images, label[None])] * steps, public.protocol)
    coin = torch.Generator().manual_seed(seed)
    for tensor in update.tensors.values():
        scale = case.noise * tensor.square().mean().sqrt()
        tensor += scale * torch.randn(tensor.shape, generator=coin, dtype=tensor.dtype)
    weights = {name: tensor.float() for name, tensor in net.state_dict().items()}
    observation = Observation(1, 0, weights, update, public)
    view = View(observation, THREATS["C"].grants, Announced(fresh), desk=Desk(seed))
    attack = create_attack(case.attack, **case.params)
    return attack.reconstruct(view, device=CPU, progress=no_progress)


def closed_forms(data: DataSpec, count: int) -> None:
    print("| attack | setting | mean | least | labels | says |\n|---|---|---|---|---|---|")
    for case in CASES:
        pictures = load_images(data.model_copy(update={"image_size": case.side}), "train")
        step = max(1, len(pictures) // count)
        scores, right, notes = [], 0, set[str]()
        for i in range(count):
            image, label = pictures.image(i * step), torch.tensor(i * 7 % CLASSES)
            result = attacked(case, image, label, seed=i)
            scores.append(float(psnr(image[None], result.images)))
            right += int(result.labels is not None and result.labels.tolist() == [int(label)])
            notes |= {note.split(":")[0] for note in result.notes if "8-bit" not in note}
        print(
            f"| {case.attack} | {case.name} | {statistics.mean(scores):.1f} | {min(scores):.1f} | "
            f"{right}/{count} | {'; '.join(sorted(notes))} |",
            flush=True,
        )


def label_rules(data: DataSpec, trials: int = 8) -> None:
    """Shares of labels recovered by untrained models: distinct ones of 100 classes, and repeated
    ones of 10. A ResNet's features are not negative, a ViT's are signed."""
    pictures = load_images(data.model_copy(update={"image_size": 32}), "train")
    print("\n| labels | sum rule | min rule | bias |\n|---|---|---|---|")
    small = vit(patch_size=4, depth=6)
    distinct = [(f"ResNet-18, batch {n}, distinct", RESNET, 100, n) for n in (1, 8, 32, 64, 96)]
    for words, network, classes, size in (
        *distinct,
        ("ViT, batch 32, distinct", small, 100, 32),
        ("ViT, batch 16, repeated", small, 10, 16),
    ):
        model = build_model(network, image_size=32, num_classes=classes, seed=0)
        shares: dict[str, list[float]] = {"sum": [], "min": [], "bias": []}
        for trial in range(trials):
            coin = torch.Generator().manual_seed(trial)
            labels = torch.randperm(classes, generator=coin)[:size]
            if classes < size:
                labels = torch.randint(0, classes, (size,), generator=coin)
            rows = torch.randperm(len(pictures), generator=coin)[:size]
            images = torch.stack([pictures.image(int(row)) for row in rows])
            update = local_update(model, [(images, labels)], Protocol(mode="eval"))
            for rule in shares:
                if rule != "bias" and classes < size:
                    continue
                recovered = recover_labels(update, model, size, rule)  # type: ignore[arg-type]
                shares[rule].append(_shared(recovered.tolist(), labels.tolist()))
        cells = [
            f"{100 * statistics.mean(s):.1f} %" if s else "distinct only" for s in shares.values()
        ]
        print(f"| {words} | {' | '.join(cells)} |", flush=True)


def _shared(recovered: list[int], labels: list[int]) -> float:
    rest, hits = list(labels), 0
    for label in recovered:
        if label in rest:
            rest.remove(label)
            hits += 1
    return hits / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", help="a tree of class/picture")
    parser.add_argument("--count", type=int, default=8)
    options = parser.parse_args()
    data = DataSpec()
    if options.data:
        data = DataSpec(name="imagefolder", path=options.data)
    closed_forms(data, options.count)
    label_rules(data)


if __name__ == "__main__":
    main()

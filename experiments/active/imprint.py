"""What the weights-only imprint gives away, and how surely.

    python -m experiments.active.imprint [--path PICTURES] [--only WORD ...]

Every victim of one class, untrained timm models, quantiles from other pictures than the victims'
unless a row says otherwise. PICTURES is a tree of class/picture; without it, the photos that come
with scikit-image, which repeat themselves. *patches*: read, of all; *right*: of those read, in the
right picture and place; *ceiling*: the least PSNR that any reading could have, as some coefficients
of a patch find no room in a token; *seconds*: of processor time, for the client's update and for
the decoding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.active.server import CPU, fixed_point_mean
from fedsim.attacks.imprint import Imprint, Picture, merge, read_update
from fedsim.attacks.manoeuvres.imprint import ImprintWeights
from fedsim.attacks.manoeuvres.imprinting import Layout, patch_basis
from fedsim.clients.data import load_images
from fedsim.core.anatomy import vit_parts
from fedsim.core.attack import no_progress
from fedsim.core.knowledge import THREATS, Announced, Traffic, View
from fedsim.core.learning import local_update
from fedsim.core.manoeuvre import Brief, Tampered
from fedsim.core.metrics import psnr
from fedsim.core.models import build_model
from fedsim.core.observation import Observation, Public
from fedsim.core.sent import Chosen
from fedsim.core.spec import DataSpec, ModelSpec, Spec, TrainSpec, Upload

CLASSES = 1000
SURROGATE = 48
RIGHT = 0.05  # root mean square, as the model sees a patch: what is read is far nearer


@dataclass(frozen=True)
class Case:
    name: str
    model: ModelSpec
    side: int
    batch: int
    train: TrainSpec | None = None
    clients: int = 1  # whose updates are summed in fixed point
    steps: int = 1  # on a new batch each
    rounds: int = 1
    blind: bool = False


def vit(size: str, **options: Any) -> ModelSpec:
    return ModelSpec(name=f"vit_{size}_patch16_224", options=options)


def delta(lr: float, steps: int = 1, **options: Any) -> TrainSpec:
    return TrainSpec(upload=Upload.DELTA, lr=lr, local_steps=steps, **options)


TINY = vit("tiny")
CASES = [
    Case("Ti/16 at 160, batch 8", TINY, 160, 8),
    Case("Ti/16 at 160, batch 8, no surrogate", TINY, 160, 8, blind=True),
    Case("Ti/16 at 160, batch 32", TINY, 160, 32),
    Case("Ti/16 at 160, batch 32, 3 rounds", TINY, 160, 32, rounds=3),
    Case("Ti/16 at 160, average pooling, batch 8",
         vit("tiny", class_token=False, global_pool="avg"), 160, 8),
    Case("Ti/16 at 160, sum of 4 x 2, fixed point", TINY, 160, 2, clients=4),
    Case("Ti/16 at 160, delta, lr .01, batch 8", TINY, 160, 8, delta(0.01)),
    Case("Ti/16 at 160, delta, lr .05, batch 8", TINY, 160, 8, delta(0.05)),
    Case("Ti/16 at 160, delta, 4 steps, 4 batches of 2", TINY, 160, 2, delta(0.05, 4), steps=4),
    Case("Ti/16 at 160, delta, 4 steps, 4 batches of 8", TINY, 160, 8, delta(0.05, 4), steps=4),
    Case("Ti/16 at 160, AdamW, one step, batch 8", TINY, 160, 8,
         delta(0.001, optimizer="adamw")),
    Case("Ti/16 at 160, AdamW, 4 steps, 4 batches of 2", TINY, 160, 2,
         delta(0.001, 4, optimizer="adamw"), steps=4),
    Case("S/16 at 224, batch 16", vit("small"), 224, 16),
    Case("S/16 at 224, batch 16, 3 rounds", vit("small"), 224, 16, rounds=3),
    Case("B/16 at 224, batch 8", vit("base"), 224, 8),
]  # fmt: skip


@dataclass
class Played:
    """One case, played: the last round's view, and what the clients and the server took."""

    view: View
    tampered: Tampered
    client: float
    loss: float
    norm: float


def play(case: Case, victims: Tensor, surrogate: Tensor) -> Played:
    """Rounds of one client, or of a cohort whose mean alone is seen."""
    train = (case.train or TrainSpec()).model_copy(update={"batch_size": case.batch})
    spec = Spec(data=DataSpec(image_size=case.side), model=case.model, train=train)
    public = Public.of(spec, CLASSES)

    def fresh() -> nn.Module:
        return build_model(case.model, image_size=case.side, num_classes=CLASSES, seed=0)

    honest = fresh().state_dict()
    views: dict[tuple[int, int], View] = {}
    spent = 0.0
    for number in range(1, case.rounds + 1):
        cohort = tuple(range(case.clients))
        owned = None if case.blind else surrogate
        brief = Brief(number, 0, cohort, honest, fresh, public, owned)
        tampered = ImprintWeights().tamper(brief)
        weights = {**honest, **tampered.changed}
        model = fresh()
        model.load_state_dict(weights)
        start = time.process_time()
        updates = [
            local_update(model, _batches(share, case.steps), public.protocol)
            for share in victims.chunk(case.clients)
        ]
        spent = time.process_time() - start
        update = updates[0] if case.clients == 1 else fixed_point_mean(updates)
        shown = replace(public, batch_size=case.batch * case.clients)
        chosen = Chosen(manoeuvre={"name": "imprint"}, about=tampered.about)
        seen = Observation(number, 0, weights, update, shown, chosen=chosen)
        grants = THREATS["G"].grants
        traffic = Traffic(tuple(views), lambda r, c: views[r, c])
        view = View(seen, grants, Announced(fresh), traffic=lambda t=traffic: t)  # type: ignore[misc]
        views[number, 0] = view
    norm = sum(float(t.norm()) ** 2 for t in update.tensors.values()) ** 0.5
    return Played(view, tampered, spent, update.loss, norm)


def _batches(pictures: Tensor, steps: int) -> list[tuple[Tensor, Tensor]]:
    return [(some, torch.full((len(some),), 3)) for some in pictures.chunk(steps)]


def measured(case: Case, victims: Tensor, surrogate: Tensor) -> list[str]:
    """A row of the table."""
    played = play(case, victims, surrogate)
    view, layout = played.view, Layout.told(played.tampered.about)
    start = time.process_time()
    result = Imprint(rounds=case.rounds).reconstruct(view, device=CPU, progress=no_progress)
    decoding = time.process_time() - start

    basis = patch_basis(*layout.patch)[: layout.pixels]
    mean, std = (torch.tensor(c, dtype=torch.float64).view(3, 1, 1) for c in view.normalisation)
    truth = _patches((victims.double() - mean) / std, layout.patch) @ basis.T  # (B, N, K)
    pictures = _read(view, case.rounds, len(victims))
    right, whose = _right(pictures, truth, basis)
    read = sum(len(picture.patches) for picture in pictures)

    scores = torch.stack([psnr(victims[i : i + 1].expand_as(result.images), result.images)
                          for i in range(len(victims))])  # fmt: skip
    best = scores.amax(1).tolist()
    room = F.fold((truth @ basis).mT, victims.shape[-2:], layout.patch, stride=layout.patch)
    ceiling = psnr(victims, (room * std + mean).clamp(0, 1).float())
    cells = [
        case.name,
        f"{100 * read / truth.shape[0] / truth.shape[1]:.1f} %",
        f"{100 * right / max(read, 1):.2f} %",
        f"{min(best):.1f}",
        f"{statistics.median(best):.1f}",
        f"{float(ceiling.min()):.1f}",
        f"{played.client:.1f} + {decoding:.1f}",
        f"{played.loss:.2f}",
        f"{played.norm:.0e}",
    ]
    if case.steps > 1:
        shares = [0] * case.steps
        for index in whose:
            shares[index * case.steps // len(victims)] += 1
        cells[0] += f" (pictures of each step: {', '.join(map(str, shares))})"
    return cells


def _patches(images: Tensor, patch: tuple[int, int]) -> Tensor:
    return F.unfold(images, patch, stride=patch).mT


def _read(view: View, rounds: int, most: int) -> list[Picture]:
    """What the attack reads, patch by patch."""
    model = view.model()
    parts = vit_parts(model)
    pictures = read_update(view, model, parts).pictures[:most]
    for at in list(view.traffic.addresses)[: rounds - 1]:
        merge(pictures, read_update(view.traffic.open(*at), model, parts).pictures)
    return pictures


def _right(pictures: Sequence[Picture], truth: Tensor, basis: Tensor) -> tuple[int, list[int]]:
    """How many patches are in the right place of the one picture that most of them are of, and
    which picture that is, for each."""
    right, whose = 0, []
    for picture in pictures:
        places = torch.tensor(list(picture.patches))
        patches = torch.stack(list(picture.patches.values())) @ basis.T
        apart = (truth[:, places] - patches).square().sum(2) / basis.shape[1]
        agree = (apart.sqrt() < RIGHT).sum(1)
        right += int(agree.max())
        whose.append(int(agree.argmax()))
    return right, whose


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", help="a tree of class/picture")
    parser.add_argument("--only", nargs="*", default=[], help="rows whose name has one of these")
    options = parser.parse_args()
    data = DataSpec()
    if options.path:
        data = DataSpec(name="imagefolder", path=options.path)
    head = ["case", "patches", "right", "least dB", "median dB", "ceiling dB",
            "seconds", "loss", "update's norm"]  # fmt: skip
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for case in CASES:
        if options.only and not any(word in case.name for word in options.only):
            continue
        images = load_images(data.model_copy(update={"image_size": case.side}), "train")
        wanted = SURROGATE + case.batch * case.clients * case.steps
        coin = torch.Generator().manual_seed(0)
        rows = torch.randperm(len(images), generator=coin)[:wanted].tolist()
        pictures = torch.stack([images.image(row) for row in rows])
        cells = measured(case, pictures[SURROGATE:], pictures[:SURROGATE])
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

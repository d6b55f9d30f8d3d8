"""Joint inversion: the PSNR of one client's pictures over the number of its updates seen together.

    python experiments/joint.py --data FACES/victims [--batches 8] [--rounds 1 2 4 8] [--each 4]

Appendix D of GIAS (Fig. A3): a client has eight pictures, and four of them, drawn anew in every
round, stand behind an update (``--each 8``: all of them every time). `fresh` weights are drawn anew
for every round, as an attacker would like them; `trained` ones move by the client's own SGD steps,
as they do in a federation. Measured are the pictures of the last round.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn

from experiments.table import interval
from fedsim.attacks import create_attack
from fedsim.clients.data import load_images
from fedsim.core.attack import no_progress
from fedsim.core.knowledge import THREATS, Announced, Traffic, View
from fedsim.core.learning import local_update
from fedsim.core.metrics import match_order, psnr
from fedsim.core.models import build_architecture, build_model
from fedsim.core.observation import Observation, Public
from fedsim.core.spec import DataSpec, ModelSpec, Spec, TrainSpec

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    data: DataSpec
    model: ModelSpec
    classes: int
    public: Public
    lr: float = 0.05

    def net(self, seed: int) -> nn.Module:
        size = self.data.image_size
        return build_model(self.model, image_size=size, num_classes=self.classes, seed=seed)


def observations(
    setting: Setting, images: Tensor, labels: Tensor, fresh: bool, drawn: Sequence[Tensor]
) -> Iterator[Observation]:
    """The client's updates, one for every round's rows."""
    net = setting.net(0)
    for round_, rows in enumerate(drawn, start=1):
        net = setting.net(round_) if fresh else net
        update = local_update(net, [(images[rows], labels[rows])], setting.public.protocol)
        weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        yield Observation(round_, 0, weights, update, setting.public)
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.sub_(update.tensors[name], alpha=setting.lr)


def draw(rng: np.random.Generator, count: int, each: int, rounds: int) -> list[Tensor]:
    """Which of the client's pictures stand behind the update of each round."""
    return [torch.as_tensor(rng.permutation(count)[:each]) for _ in range(rounds)]


def attacked(
    setting: Setting, updates: list[Observation], rounds: int, steps: int, tv: float
) -> Tensor:
    """The pictures found from the last ``rounds`` updates."""

    def view(observation: Observation, traffic: Traffic | None = None) -> View:
        size, classes = setting.data.image_size, setting.classes
        return View(
            observation,
            THREATS["C"].grants,
            Announced(
                lambda: build_architecture(setting.model, image_size=size, num_classes=classes)
            ),
            traffic=(lambda: traffic) if traffic is not None else None,
        )

    by_address = {(o.round, o.client): o for o in updates}
    traffic = Traffic(tuple(by_address), lambda r, c: view(by_address[r, c]))
    attack = create_attack("joint", rounds=rounds, steps=steps, tv=tv)
    result = attack.reconstruct(
        view(updates[-1], traffic=traffic), device=CPU, progress=no_progress
    )
    return result.images


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", help="a tree of class folders; the built-in photos without it")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--each", type=int, default=4, help="pictures behind an update, of eight")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tv", type=float, default=0.01)
    options = parser.parse_args()
    name = "imagefolder" if options.data else "photos"
    data = DataSpec(name=name, path=options.data, image_size=32)
    pictures = load_images(data, "train")
    model, classes = ModelSpec(name="convnet"), len(pictures.classes)
    train = TrainSpec(batch_size=options.each)
    public = Public.of(Spec(data=data, model=model, train=train), classes)
    setting = Setting(data, model, classes, public)
    rng, coin = np.random.default_rng(0), np.random.default_rng(1)
    # Distinct labels where there are enough classes: which update saw which picture is then known.
    scores: dict[tuple[str, int], list[float]] = {}
    for _ in track(range(options.batches), description="batches"):
        chosen = [
            int(rng.choice(np.flatnonzero(pictures.labels == c)))
            for c in rng.permutation(classes)[:8]
        ]
        images = torch.stack([pictures.image(row) for row in chosen])
        labels = torch.tensor(pictures.labels[chosen])
        drawn = draw(coin, len(chosen), options.each, max(options.rounds))
        for word, fresh in (("fresh", True), ("trained", False)):
            updates = list(observations(setting, images, labels, fresh, drawn))
            for rounds in options.rounds:
                guesses = attacked(setting, updates, rounds, options.steps, options.tv)
                truth = images[drawn[-1]]
                order = match_order(truth, guesses)
                value = float(psnr(truth, guesses[torch.as_tensor(order)]).mean())
                scores.setdefault((word, rounds), []).append(value)
    fewest, most = options.rounds[0], options.rounds[-1]
    heads = [*(f"{r} rounds" for r in options.rounds), f"{most} less {fewest}"]
    print(f"| weights | {' | '.join(heads)} |")
    print("|---|" + "---|" * len(heads))
    for word in ("fresh", "trained"):
        cells = [interval(np.array(scores[word, r])) for r in options.rounds]
        cells.append(interval(np.array(scores[word, most]) - np.array(scores[word, fewest])))
        print(f"| {word} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

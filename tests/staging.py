"""A stage for attacks: real photos, small models, and the observation a server would have."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from fedsim.attacks import create_attack
from fedsim.campaign.jobs import Job
from fedsim.clients.data.datasets import load_images
from fedsim.core.attack import Reconstruction, no_progress
from fedsim.core.files import write_atomically
from fedsim.core.knowledge import THREATS, Announced, View
from fedsim.core.learning import local_update
from fedsim.core.models import build_architecture, build_model
from fedsim.core.observation import Observation, Public
from fedsim.core.run import Run
from fedsim.core.spec import DataSpec, ModelSpec, Spec, TrainSpec

TINY = ModelSpec(options={"patch_size": 8, "depth": 2, "embed_dim": 96})
CPU = torch.device("cpu")


def photos(size: int, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    images = load_images(DataSpec(image_size=size), "train")
    return torch.stack([images.image(r) for r in rows]), torch.tensor(images.labels[list(rows)])


def observe(model: ModelSpec, images, labels, train: TrainSpec | None = None) -> Observation:
    data = DataSpec(image_size=images.shape[-1])
    train = train or TrainSpec(batch_size=len(images))
    public = Public.of(Spec(data=data, model=model, train=train), num_classes=8)
    net = build_model(model, image_size=data.image_size, num_classes=8, seed=0)
    batches = [(images, labels)] * (train.local_steps or 1)
    update = local_update(net, batches, public.protocol)
    return Observation(1, 0, net.state_dict(), update, public)


def attack(
    observation: Observation, name: str, factory=None, threat: str = "B", **params
) -> Reconstruction:
    """An attack, its ledger checked against what it said it needs and uses."""
    public = observation.public

    def announced() -> nn.Module:
        spec = ModelSpec.model_validate(public.architecture)
        size, classes = public.image_size, public.num_classes
        return build_architecture(spec, image_size=size, num_classes=classes)

    view = View(observation, THREATS[threat].grants, Announced(factory or announced))
    result = create_attack(name, **params).reconstruct(view, device=CPU, progress=no_progress)
    said = create_attack(name, **params)
    assert set(view.ledger) <= said.needs | getattr(said, "uses", frozenset())
    return result


def convnet() -> nn.Module:
    """A small smooth network, for which matching is easy."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(1024, 8),
        )


def convnet_observation(side: int = 16, picture: int = 70) -> tuple[Observation, torch.Tensor]:
    images, labels = photos(side, [picture])
    public = Public.of(Spec(data=DataSpec(image_size=side)), num_classes=8)
    update = local_update(convnet(), [(images, labels)], public.protocol)
    return Observation(1, 0, convnet().state_dict(), update, public), images


def several_steps(steps: int = 4) -> tuple[Observation, torch.Tensor]:
    images, labels = photos(16, [70])
    train = TrainSpec(upload="delta", local_steps=steps, lr=0.05)
    public = Public.of(Spec(data=DataSpec(image_size=16), train=train), num_classes=8)
    update = local_update(convnet(), [(images, labels)] * steps, public.protocol)
    return Observation(1, 0, convnet().state_dict(), update, public), images


def prepared(spec: ModelSpec, side: int, prepare) -> nn.Module:
    return prepare(build_model(spec, image_size=side, num_classes=8, seed=0))


def observe_net(net: nn.Module, spec: ModelSpec, images, labels) -> Observation:
    public = Public.of(Spec(data=DataSpec(image_size=images.shape[-1]), model=spec), num_classes=8)
    update = local_update(net, [(images, labels)], public.protocol)
    weights = {name: tensor.float() for name, tensor in net.state_dict().items()}
    return Observation(1, 0, weights, update, public)


def script(name: str, *arguments: object) -> str:
    """What a script of ours prints."""
    root = Path(__file__).parent.parent
    module = ".".join(Path("experiments", name).with_suffix("").parts)
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=root
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def short_report(run: Run, jobs: list[Job], *, redacted: bool = False) -> Path:
    """In the place of `write_report`, for tests whose time would go into its page."""
    write_atomically(run.report, b"a report")
    return run.report

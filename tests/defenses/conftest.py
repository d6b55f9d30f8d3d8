"""What tests of defenses share: small models, a batch, the upload of a client, and what a server
makes of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from fedsim.attacks import create_attack
from fedsim.attacks.inverting_gradients import InvertingGradients
from fedsim.audit.stages import federate
from fedsim.core.attack import no_progress
from fedsim.core.defense import Informed
from fedsim.core.knowledge import THREATS, Announced, View
from fedsim.core.learning import Protocol, Trail, Update, learn, local_update
from fedsim.core.metrics import psnr
from fedsim.core.models import build_model
from fedsim.core.observation import Observation, Public
from fedsim.core.spec import Component, DataSpec, ModelSpec, Spec, TrainSpec
from fedsim.defenses import create_defense
from fedsim.defenses.applied import announced, countered, prepared
from fedsim.scoring.canary import CANARY_TOLERANCE, check_canaries
from tests.conftest import small_spec
from tests.staging import CPU, photos

BATCH = [(torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([1]))]


@pytest.fixture
def vit():
    spec = ModelSpec(options={"patch_size": 8, "depth": 2, "embed_dim": 96})
    return build_model(spec, image_size=32, num_classes=5, seed=0)


def secret(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def upload(vit, defense, batch=BATCH, seed: int = 0):
    return local_update(vit, batch, Protocol(), defenses=[defense], rng=secret(seed))


def pictures(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    coin = torch.Generator().manual_seed(1)
    labels = torch.arange(count) % 5
    return [(torch.rand(count, 3, 32, 32, generator=coin), labels)]


VIT = ModelSpec(options={"patch_size": 8, "depth": 2, "embed_dim": 96})
RESNET, CONVNET = ModelSpec(name="resnet10t"), ModelSpec(name="convnet")
MODELS = {"vit": VIT, "resnet": RESNET, "convnet": CONVNET}


@dataclass
class Defended:
    """A client of two photographs or one, and the server it uploads to."""

    name: str
    params: dict
    model: ModelSpec = VIT
    rows: tuple[int, ...] = (70,)
    upload: str = "gradient"

    def __post_init__(self) -> None:
        self.defense = create_defense(self.name, **self.params)
        self.batch = photos(32, self.rows)
        spec = Spec(
            data=DataSpec(image_size=32),
            model=self.model,
            train=TrainSpec(batch_size=len(self.rows), upload=self.upload),
            defenses=[Component(name=self.name, **self.params)],
        )
        self.public = Public.of(spec, num_classes=8)
        plain = build_model(self.model, image_size=32, num_classes=8, seed=0)
        self.net = prepared(plain, [self.defense], spec.train)

    def uploaded(self, seed: int = 5, trail: Trail | None = None) -> Update:
        net = copy.deepcopy(self.net)
        coin, how = secret(seed), self.public.protocol
        return learn(net, [self.batch], how, defenses=[self.defense], rng=coin, trail=trail)

    def view(self, seed: int = 5) -> View:
        update = self.uploaded(seed)
        seen = Observation(1, 0, self.net.state_dict(), update, self.public)
        counter = partial(countered, update, self.public.defenses)
        return View(seen, THREATS["C"].grants, Announced(partial(announced, self.public), counter))

    def informed(self, seed: int = 5) -> tuple[Informed, nn.Module]:
        view = self.view(seed)
        model = view.model()
        return view.informed(model), model

    def solved(self, seed: int = 5) -> float:
        """The PSNR of what a closed form makes of the picture."""
        attack = create_attack("patch_solve")
        result = attack.reconstruct(self.view(seed), device=CPU, progress=no_progress)
        return float(psnr(result.images, self.batch[0])[0])

    def matching_loss(self, *, adaptive: bool, seed: int = 5, engine: str = "first_order") -> float:
        """Of the true pictures, simulated by a server that knows of the defense, or not."""
        attack = InvertingGradients(adaptive=adaptive, engine=engine)
        task = attack.task(self.view(seed), CPU)
        images, labels = self.batch
        shown = self.public.protocol.normalise(images)[None]
        return float(task.matcher.value(shown, labels[None]))


ONE_ROUND = "train={rounds: 1, clients_per_round: 2, lr: 0.05, evaluate: false}"
DELTA = [f"train.{k}" for k in ("upload=delta", "local_steps=2", "batch_size=2")]


def assert_canary_holds(root: Path, defense: str) -> None:
    """In a federation, for gradients, and for deltas of two steps."""
    for name, overrides in (("gradient", []), ("delta", DELTA)):
        spec = small_spec(ONE_ROUND, f"defenses=[{defense}]", *overrides)
        run = federate(spec, root / name)
        errors = check_canaries(run, [(1, client) for client in spec.cohort(1)])
        assert len(errors) == 2
        assert max(errors.values()) < CANARY_TOLERANCE, name

"""Several local steps: the simulated client is the real one, and its derivative is right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedsim.attacks.matching.local_steps import OptimizerMemory, PathMatcher, UnrolledMatcher
from fedsim.attacks.matching.matcher import GradientMatcher, Way
from fedsim.attacks.matching.objectives import Cosine, SquaredL2, Target
from fedsim.core.learning import Protocol, local_update
from fedsim.core.metrics import psnr
from fedsim.core.optimizers import Schedule
from fedsim.core.spec import ModelSpec, TrainSpec
from tests.attacks.matching.conftest import cosine, pictures, tiny
from tests.staging import attack, convnet, observe, photos, several_steps


@pytest.mark.parametrize("local", ["unroll", "surrogate", "single"])
def test_local_steps_are_simulated(local: str) -> None:
    observation, images = several_steps()
    found = attack(
        observation,
        "inverting_gradients",
        convnet,
        threat="C",
        local=local,
        pictures=1,
        steps=150,
        tv=1e-3,
    )
    guess = attack(observation, "prior_only", convnet)
    assert len(found.images) == 1
    margin = 2 if local == "single" else 5  # pretending it was one step costs
    assert float(psnr(images, found.images)) > float(psnr(images, guess.images)) + margin


PROTOCOLS = {
    "plain": Protocol(upload="delta", lr=0.1),
    "momentum and decay": Protocol(upload="delta", lr=0.05, momentum=0.9, weight_decay=0.1),
    "scheduled": Protocol(upload="delta", lr=0.1, momentum=0.5, schedule=Schedule("cosine")),
    "proximal": Protocol(upload="delta", lr=0.1, momentum=0.5, proximal=2.0),
    "proximal and clipped": Protocol(upload="delta", lr=0.1, proximal=2.0, clip=0.1),
    "clipped": Protocol(upload="delta", lr=0.1, momentum=0.5, clip=0.1),
}


ADAPTIVE = {
    "adamw": Protocol(upload="delta", optimizer="adamw", lr=0.01, weight_decay=0.1),
    "adam": Protocol(
        upload="delta", optimizer="adam", lr=0.01, weight_decay=0.1, betas=(0.8, 0.99)
    ),
}


@pytest.mark.parametrize("name", [*PROTOCOLS, *ADAPTIVE])
def test_the_unrolled_client_is_the_real_client(name: str) -> None:
    protocol = {**PROTOCOLS, **ADAPTIVE}[name]
    protocol = Protocol(**{**protocol.__dict__, "mean": (0, 0, 0), "std": (1, 1, 1)})
    images, labels = pictures(4, 0, 4), torch.tensor([0, 1, 2, 3])
    rows = [[0, 1], [2, 3], [0, 1]]
    batches = [(images[r], labels[r]) for r in rows]
    update = local_update(tiny(), batches, protocol)
    target = Target(update.tensors)
    matcher = UnrolledMatcher(
        tiny(), target, SquaredL2(), way="double", protocol=protocol, batches=rows
    )
    assert float(matcher.value(images[None], labels[None])) < 1e-8


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_adjoint_of_local_steps_is_double_backward(name: str) -> None:
    protocol = PROTOCOLS[name]
    images, labels, rows = pictures(4, 0, 4), torch.tensor([0, 1, 2, 3]), [[0, 1], [2, 3], [1, 2]]
    batches = [(images[r], labels[r]) for r in rows]
    target = Target(local_update(tiny(), batches, protocol).tensors)
    ways: tuple[Way, ...] = ("first_order", "double")
    found = [
        UnrolledMatcher(tiny(), target, Cosine(), way=way, protocol=protocol, batches=rows)(
            pictures(4, 5, 4)[None], labels[None]
        )
        for way in ways
    ]
    assert float(found[0].value) == pytest.approx(float(found[1].value), rel=1e-4)
    assert cosine(found[0].images, found[1].images) > 0.999


def test_a_surrogate_point_explains_several_steps_better_than_the_start() -> None:
    protocol = Protocol(upload="delta", lr=0.5, mean=(0, 0, 0), std=(1, 1, 1))
    images, labels = pictures(4, 0, 4), torch.tensor([0, 1, 2, 3])
    update = local_update(tiny(), [(images, labels)] * 8, protocol)
    target = Target({n: -t for n, t in update.tensors.items()})
    start = GradientMatcher(tiny(), target, Cosine())
    between = PathMatcher(tiny(), target, Cosine(), delta=update.tensors)
    truth, classes = images[None], labels[None]
    assert float(between.value(truth, classes)) < 0.5 * float(start.value(truth, classes))


def test_the_optimiser_of_the_simulator_repeats_torch() -> None:
    protocol = Protocol(upload="delta", optimizer="adamw", lr=0.01, weight_decay=0.1)
    weight = torch.randn(5)
    mine, memory = [weight.clone()], OptimizerMemory(protocol)
    theirs = nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1)
    for step in range(3):
        gradient = torch.randn(5, generator=torch.Generator().manual_seed(step))
        theirs.grad = gradient.clone()
        optimizer.step()
        mine = memory.step(mine, [gradient])
    assert torch.allclose(mine[0], theirs, atol=1e-6)


def test_the_unrolled_client_trains_also_what_is_not_matched() -> None:
    protocol = Protocol(upload="delta", lr=0.5, mean=(0, 0, 0), std=(1, 1, 1))
    images, labels, rows = pictures(2, 0, 4), torch.tensor([0, 1]), [[0, 1]] * 3
    update = local_update(tiny(), [(images, labels)] * 3, protocol)
    part = Target({name: update.tensors[name] for name in ("1.weight", "1.bias")})
    ways: tuple[Way, ...] = ("first_order", "double")
    for way in ways:
        matcher = UnrolledMatcher(
            tiny(), part, SquaredL2(), way=way, protocol=protocol, batches=rows
        )
        assert float(matcher.value(images[None], labels[None])) < 1e-8


@pytest.mark.parametrize("way", ["first_order", "double"])
def test_a_weight_that_is_one_number_is_stepped_like_any_other(way: Way) -> None:
    images, labels = photos(32, [70])
    train = TrainSpec(upload="delta", local_steps=2, clip=0.5)
    observation = observe(ModelSpec(name="tests.oddities:Unused"), images, labels, train)
    assert observation.update.tensors["lone"].shape == ()
    found = attack(observation, "inverting_gradients", threat="C", steps=2, engine=way)
    assert found.loss is not None

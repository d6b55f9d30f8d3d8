"""Unseen noise: what Flower's LocalDpMod leaves of a canary."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.clientapp.mod import LocalDpMod

from fedsim.core.learning import Protocol, Update, local_update
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec, Upload
from fedsim.defenses import create_defense
from fedsim.scoring.canary import CANARY_TOLERANCE
from fedsim.scoring.unseen_noise import quiet, unexplained
from tests.defenses.test_flower import BATCH, through, weights

PROTOCOL = Protocol(upload=Upload.DELTA, lr=0.05, momentum=0.9)
STEPS = BATCH * 3
CLIP, EPSILON = 0.1, 5000.0


@pytest.fixture(scope="module")
def uploads() -> tuple[torch.nn.Module, list[Update]]:
    """A model, and the update of a client with Flower's mod, noised by five different coins."""
    spec = ModelSpec(options={"patch_size": 8, "depth": 2, "embed_dim": 96})
    model = build_model(spec, image_size=32, num_classes=5, seed=0)
    plain, sent, found = local_update(model, STEPS, PROTOCOL), weights(model), []
    after = {name: sent[name] + t for name, t in plain.tensors.items()}
    for seed in range(5):
        np.random.seed(seed)
        _, seen = through(LocalDpMod(CLIP, CLIP, EPSILON, 1e-5), sent, after)
        found.append(replace(plain, tensors=seen))
    return model, found


def canary(model, observed: Update, protocol: Protocol = PROTOCOL, **changes: float) -> float:
    told = {"clip": CLIP, "epsilon": EPSILON, "delta": 1e-5, **changes}
    found = quiet([create_defense("local_dp", **told)])
    assert found is not None
    return unexplained(local_update(model, STEPS, protocol, defenses=found[0]), observed, found[1])


def test_noise_as_it_was_declared_explains_all_that_lies_between(uploads) -> None:
    model, found = uploads
    assert [canary(model, one) for one in found] == [0.0] * 5


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon": 0.9 * EPSILON},
        {"epsilon": 1.1 * EPSILON},
        {"clip": 2 * CLIP, "sensitivity": CLIP},
    ],
)
def test_other_noise_or_another_norm_does_not(uploads, changes: dict[str, float]) -> None:
    model, found = uploads
    assert min(canary(model, one, **changes) for one in found) > 100 * CANARY_TOLERANCE


def test_another_training_does_not(uploads) -> None:
    model, found = uploads
    other = replace(PROTOCOL, mean=(0.0,) * 3, std=(1.0,) * 3)
    assert min(canary(model, one, other) for one in found) > 100 * CANARY_TOLERANCE


def test_a_client_without_the_noise_does_not_pass_for_one_with_it(uploads) -> None:
    model, _ = uploads
    clipped = local_update(model, STEPS, PROTOCOL, defenses=[create_defense("clipping", norm=CLIP)])
    assert canary(model, clipped) > 100 * CANARY_TOLERANCE


def test_only_gaussian_noise_that_comes_last_is_known_by_its_size() -> None:
    noise = create_defense("gaussian_noise", std=0.1)
    clipping = create_defense("clipping", norm=1.0)
    found = quiet([clipping, noise])
    assert found is not None
    assert (found[0][0], found[1]) == (clipping, 0.1)
    assert quiet([noise, clipping]) is None
    assert quiet([create_defense("gaussian_noise", std=0.1, relative=True)]) is None
    assert quiet([]) is None

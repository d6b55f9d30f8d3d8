"""Features beside the truth: cosines, partners, and what a grey picture has."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fedsim.core.learning import Update
from fedsim.core.observation import Observation, Public, read_observation
from fedsim.core.run import Run, observation_path
from fedsim.core.spec import load_spec
from fedsim.core.vault import Truth, Vault
from fedsim.defenses.applied import announced
from fedsim.scoring.activations import features_beside, features_of


def test_true_features_in_any_order_and_size_come_out_at_one(small_run: Run) -> None:
    observation = read_observation(observation_path(small_run.observations, *_victim(small_run)))
    truth = Vault(small_run.vault).read(*_victim(small_run))
    model = announced(observation.public)
    model.load_state_dict(observation.weights)
    own = features_of(model.eval(), observation.public.protocol.normalise(truth.images))
    found, free = features_beside(observation, truth, 3 * own.flip(0))
    assert all(value is not None and abs(value - 1) < 1e-5 for value in found)
    assert all(value is not None and value < 0.99 for value in free)
    other, _ = features_beside(observation, truth, torch.randn_like(own))
    assert all(value is not None and abs(value) < 0.5 for value in other)


def test_features_of_another_width_are_none(small_run: Run) -> None:
    observation = read_observation(observation_path(small_run.observations, *_victim(small_run)))
    truth = Vault(small_run.vault).read(*_victim(small_run))
    found, _ = features_beside(observation, truth, torch.rand(1, 3))
    assert found == [None] * len(truth.images)


class Normed(nn.Module):
    """A head behind BatchNorm: what it reads of a picture depends on its batch."""

    def __init__(self, num_classes: int, image_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=2)
        self.norm = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(torch.relu(self.norm(self.conv(images))).mean((2, 3)))
        return logits


def test_features_behind_batchnorm_are_those_of_the_batch_that_was_learned_from() -> None:
    own = f"model={{name: '{__name__}:Normed'}}"
    public = Public.of(load_spec({}, ["data.image_size=16", "train.batch_size=2", own]), 5)
    coin = torch.Generator().manual_seed(0)
    model = announced(public).train()
    images, weights = torch.rand(5, 3, 16, 16, generator=coin), model.state_dict()
    truth = Truth(images, torch.arange(5), [[0, 3], [4, 1, 2]], 0, [])
    update = Update(public.protocol.upload, {})
    observation = Observation(1, 0, copy.deepcopy(weights), update, public)
    read = [features_of(model, public.protocol.normalise(images[rows])) for rows in truth.batches]
    claimed = torch.cat(read)
    found, free = features_beside(observation, truth, claimed)
    assert all(value is not None and value > 1 - 1e-6 for value in found)
    assert all(value is not None for value in free)


def _victim(run: Run) -> tuple[int, int]:
    first = run.scores.iloc[0]
    return int(first["round"]), int(first["client"])

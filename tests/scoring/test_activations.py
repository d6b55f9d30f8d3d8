"""Features beside the truth: cosines, partners, and what a grey picture has."""

from __future__ import annotations

import torch

from fedsim.core.observation import read_observation
from fedsim.core.run import Run, observation_path
from fedsim.core.vault import Vault
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


def _victim(run: Run) -> tuple[int, int]:
    first = run.scores.iloc[0]
    return int(first["round"]), int(first["client"])

"""Percentile privacy: the largest numbers, cut off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.core.defense import Exposure, Informed
from fedsim.core.learning import Trail, Update
from fedsim.core.spec import Upload
from fedsim.defenses.percentile_privacy import PercentilePrivacy, at_limit, percentile_of
from tests.defenses.conftest import MODELS, Defended, assert_canary_holds, secret

UPDATE = Update(
    Upload.DELTA,
    {
        "a": torch.tensor([[0.4, -0.02], [0.01, -0.3]]),
        "b": torch.tensor([0.06, 0.0]),
        "scale": torch.tensor(9.0),
    },
)


def test_small_numbers_become_zero_and_large_ones_are_cut_off() -> None:
    filtered = PercentilePrivacy(percentile=50, gamma=0.1).protect_update(UPDATE, secret())
    # Sizes 0, .01, .02, .06, .3, .4, 9: the median is .06, which stays.
    wanted = torch.tensor([[0.1, 0.0], [0.0, -0.1]])
    assert torch.allclose(filtered.tensors["a"], wanted)
    assert torch.allclose(filtered.tensors["b"], torch.tensor([0.06, 0.0]))
    assert float(filtered.tensors["scale"]) == 9.0  # what has no dimension is left


def test_the_limit_is_that_of_one_local_step() -> None:
    several = replace(UPDATE, steps=4)
    filtered = PercentilePrivacy(percentile=0, gamma=0.05).protect_update(several, secret())
    assert torch.allclose(filtered.tensors["a"], torch.tensor([[0.2, -0.02], [0.01, -0.2]]))


@pytest.mark.parametrize("percentile", [0, 10, 33.3, 99, 100])
def test_percentiles_are_numpys(percentile: float) -> None:
    sizes = torch.rand(101, generator=secret())
    wanted = np.percentile(sizes.numpy(), percentile)
    assert float(percentile_of(sizes, percentile)) == pytest.approx(float(wanted), rel=1e-5)


def test_a_server_matches_what_was_uploaded_and_sees_what_was_cut() -> None:
    defense = PercentilePrivacy(percentile=50, gamma=0.1)
    filtered = defense.protect_update(replace(UPDATE, steps=2), secret())
    del filtered.tensors["scale"]
    informed = defense.counter(Informed(filtered), torch.nn.Identity())
    assert informed.masked
    assert at_limit(filtered.tensors.values(), 0.1) == pytest.approx(2 / 3)
    assert "66.7% of the numbers stand at the limit" in informed.notes[0]
    assert at_limit([torch.tensor([0.123])], 0.1) == 0
    assert at_limit([torch.zeros(2)], 0.1) == 0


@pytest.mark.parametrize("model", MODELS)
def test_it_proves_what_it_did_and_costs_less_than_a_dense_upload(model: str) -> None:
    stage, trail = (
        Defended("percentile_privacy", {"percentile": 90}, MODELS[model], (70, 20)),
        Trail(),
    )
    update = stage.uploaded(trail=trail)
    assert [(e["defense"], e["stage"]) for e in trail.entries] == [("PercentilePrivacy", "update")]
    assert max(float(t.abs().max()) for t in update.tensors.values()) <= 0.01 + 1e-6
    left = sum(int((t != 0).sum()) for t in update.tensors.values())
    assert left <= 0.11 * sum(t.numel() for t in update.tensors.values())
    assert stage.defense.encoded_bytes(update) < 0.3 * update.nbytes()
    knows, does_not = (stage.matching_loss(adaptive=adaptive) for adaptive in (True, False))
    assert knows <= does_not


def test_no_budget_is_promised() -> None:
    assert PercentilePrivacy().budget(Exposure(1.0, 1, 1)) is None


def test_the_canary_holds(tmp_path: Path) -> None:
    assert_canary_holds(tmp_path, "{name: percentile_privacy}")

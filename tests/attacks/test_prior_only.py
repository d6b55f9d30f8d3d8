"""The guesser, who never sees the update."""

from __future__ import annotations

import torch

from fedsim.attacks import create_attack
from fedsim.core.attack import no_progress
from fedsim.core.knowledge import THREATS, Announced, Assets, View
from tests.staging import CPU, TINY, attack, observe, photos


def test_prior_only_never_reads_the_update() -> None:
    images, labels = photos(32, [5])
    observation = observe(TINY, images, labels)
    observation.update.tensors.clear()
    result = attack(observation, "prior_only")
    assert torch.equal(result.images, torch.full_like(images, 0.5))


def test_with_surrogate_data_the_guess_is_their_mean_picture() -> None:
    images, labels = photos(32, [5, 9])
    surrogate, _ = photos(32, [100, 200, 300])
    observation = observe(TINY, images, labels)
    grants = THREATS["D"].grants
    view = View(observation, grants, Announced(torch.nn.Identity), assets=Assets(surrogate))
    result = create_attack("prior_only").reconstruct(view, device=CPU, progress=no_progress)
    assert result.images.shape == (2, 3, 32, 32)
    assert torch.allclose(result.images[1], surrogate.mean(0))
    assert "update" not in view.ledger

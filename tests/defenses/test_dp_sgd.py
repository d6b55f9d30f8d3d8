"""DP-SGD: every sample clipped, noise as it says, a budget as opacus counts it."""

from __future__ import annotations

import pytest
import torch

from fedsim.core.errors import ModelError
from fedsim.core.learning import Protocol, local_update
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec
from fedsim.defenses import create_defense
from tests.defenses.conftest import pictures, upload


def test_dp_sgd_is_the_plain_gradient_where_nothing_is_clipped_or_added(vit) -> None:
    batch = pictures(20)  # more than are held at once
    plain = local_update(vit, batch, Protocol()).tensors
    loose = upload(vit, create_defense("dp_sgd", clip=1e6, noise=0.0), batch).tensors
    for name in plain:
        assert torch.allclose(plain[name], loose[name], atol=1e-5)


def test_dp_sgd_clips_every_sample_and_adds_the_noise_it_says(vit) -> None:
    batch = pictures(4)
    clip = 0.01
    exact = upload(vit, create_defense("dp_sgd", clip=clip, noise=0.0), batch).tensors
    by_hand: dict[str, torch.Tensor] = {}
    for image, label in zip(*batch[0], strict=True):
        own = local_update(vit, [(image[None], label[None])], Protocol()).tensors
        norm = torch.cat([t.flatten() for t in own.values()]).norm()
        for name, tensor in own.items():
            by_hand[name] = by_hand.get(name, 0) + tensor * min(1.0, clip / float(norm)) / 4
    assert all(torch.allclose(exact[n], by_hand[n], atol=1e-6) for n in exact)
    noisy = upload(vit, create_defense("dp_sgd", clip=clip, noise=2.0), batch).tensors
    apart = torch.cat([(noisy[n] - exact[n]).flatten() for n in exact])
    assert float(apart.std()) == pytest.approx(2.0 * clip / 4, rel=0.02)


def test_dp_sgd_counts_its_budget_as_opacus_does() -> None:
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    for _ in range(50):
        accountant.step(noise_multiplier=1.1, sample_rate=0.05)
    defense = create_defense("dp_sgd", noise=1.1)
    assert defense.epsilon(0.05, 50) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    assert defense.epsilon(0.05, 100) > defense.epsilon(0.05, 50)
    assert create_defense("dp_sgd", noise=0.0).epsilon(0.05, 1) == float("inf")


def test_dp_sgd_refuses_batchnorm() -> None:
    resnet = build_model(ModelSpec(name="resnet10t"), image_size=32, num_classes=5, seed=0)
    with pytest.raises(ModelError, match=r"BatchNorm.*GroupNorm"):
        create_defense("dp_sgd").prepare_model(resnet)

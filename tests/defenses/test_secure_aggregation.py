"""Secure aggregation: masks cancel in the sum and hide each upload."""

from __future__ import annotations

import pytest
import torch

from fedsim.core.learning import Protocol, local_update
from fedsim.defenses import create_defense
from tests.defenses.conftest import pictures


def uploads(vit, cohort: list[int]) -> tuple[dict, dict]:
    """What each client would upload in the clear, and what it uploads masked."""
    defense = create_defense("secure_aggregation")
    clear, masked = {}, {}
    for client in cohort:
        coin = torch.Generator().manual_seed(client)
        batch = [(torch.rand(1, 3, 32, 32, generator=coin), torch.tensor([client % 5]))]
        clear[client] = local_update(vit, batch, Protocol()).tensors
        acting = defense.at_round(4, client, cohort)
        masked[client] = local_update(vit, batch, Protocol(), defenses=[acting]).tensors
    return clear, masked


@pytest.mark.parametrize("stayed", [[2, 5, 9], [2, 9], [5]])
def test_masks_cancel_in_the_sum_also_when_clients_drop_out(vit, stayed: list[int]) -> None:
    cohort = [2, 5, 9]
    clear, masked = uploads(vit, cohort)
    for name in clear[2]:
        total = {name: sum(masked[client][name] for client in stayed)}
        defense = create_defense("secure_aggregation")
        found = defense.reveal(total, 4, cohort, stayed)[name]
        wanted = sum(clear[client][name].double() for client in stayed)
        # Each upload is rounded to a grid of 2^-24, and the sum to 32 bits once more.
        torch.testing.assert_close(
            found.double(), wanted, rtol=2.0**-24, atol=len(stayed) * 2.0**-24
        )


def test_a_masked_upload_alone_is_noise(vit) -> None:
    clear, masked = uploads(vit, [2, 5])
    name = "blocks.0.mlp.fc1.weight"
    held, plain = masked[2][name].double().flatten(), clear[2][name].double().flatten()
    assert masked[2][name].dtype == torch.int64
    assert abs(float(torch.corrcoef(torch.stack([held, plain]))[0, 1])) < 0.05
    assert float(held.std()) == pytest.approx(2.0**64 / 12**0.5, rel=0.05)  # uniform


def test_the_sum_of_a_cohort_is_the_gradient_of_its_joint_batch(vit) -> None:
    """What secure aggregation leaves to the server is one gradient of all the clients' pictures:
    as hard to invert as a larger batch, and no harder."""
    images, labels = pictures(6)[0]
    apart = [
        local_update(vit, [(images[i : i + 2], labels[i : i + 2])], Protocol()).tensors
        for i in (0, 2, 4)
    ]
    joint = local_update(vit, [(images, labels)], Protocol()).tensors
    for name, tensor in joint.items():
        mean = torch.stack([one[name] for one in apart]).mean(0)
        assert torch.allclose(mean, tensor, atol=1e-5)

"""Coins: the same secret, the same noise; a secret of a client's own uses all of its bits."""

from __future__ import annotations

import torch

from fedsim.core.coin import WIDEST, coin_of, drawn_secret, training_seed

WIDE = 2**200 + 12345


def noise(secret: int) -> torch.Tensor:
    return torch.randn(8, generator=coin_of(secret))


def test_a_seed_is_taken_as_torch_takes_it() -> None:
    for seed in (0, 7, 2**48 - 1, 2**63 - 1):
        expected = torch.randn(8, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(noise(seed), expected)
        assert training_seed(seed) == seed


def test_a_wide_secret_can_be_replayed() -> None:
    assert torch.equal(noise(WIDE), noise(WIDE))
    first = coin_of(WIDE)
    torch.randn(2000, generator=first)  # beyond the words of one state
    second = coin_of(WIDE)
    torch.randn(2000, generator=second)
    assert torch.equal(first.get_state(), second.get_state())
    drawn = torch.randn(20_000, generator=coin_of(WIDE))
    assert abs(float(drawn.mean())) < 0.05
    assert abs(float(drawn.std()) - 1) < 0.05


def test_every_bit_of_a_wide_secret_counts() -> None:
    """Of a seed, torch uses the last 32: two that differ above are the same noise."""
    assert torch.equal(noise(3), noise(3 + 2**32))
    for bit in (0, 31, 32, 63, 64, 128, 255):
        assert not torch.equal(noise(WIDE), noise(WIDE ^ (1 << bit)))


def test_secrets_are_drawn_anew_and_are_wide() -> None:
    drawn = {drawn_secret() for _ in range(64)}
    assert len(drawn) == 64
    assert all(2**63 <= secret < WIDEST for secret in drawn)
    assert max(drawn) > 2**240


def test_the_seed_of_the_training_gives_no_secret_away() -> None:
    seeds = {training_seed(WIDE + at) for at in range(8)}
    assert len(seeds) == 8
    assert all(seed < 2**63 for seed in seeds)
    assert not torch.equal(torch.randn(8, generator=coin_of(training_seed(WIDE))), noise(WIDE))

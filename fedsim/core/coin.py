"""Coins of clients: what the noise and the shuffling of their defenses are drawn by.

A simulated client's secret is a number from the spec's seed, so that a run can be repeated. A
client on a machine of its own draws its secret there, in 256 bits, and tells nobody but its vault.
"""

from __future__ import annotations

import hashlib
import secrets

import torch

from fedsim.core.errors import FedsimError
from fedsim.core.seeds import seed_from

WIDEST = 2**256  # no secret is larger
_NARROW = 2**63  # below it a secret is a seed as torch takes it
_HEAD, _WORDS = 24, 624  # bytes before the words of the Mersenne Twister in torch's state; words


def drawn_secret() -> int:
    """A secret from the system's own randomness, too large to be taken for a seed."""
    return _NARROW + secrets.randbelow(WIDEST - _NARROW)


def coin_of(secret: int) -> torch.Generator:
    """The coin of a secret. Of a seed, torch uses 32 bits, which can be tried one by one: a wide
    secret fills the generator's whole state instead."""
    coin = torch.Generator().manual_seed(training_seed(secret))
    if secret < _NARROW:
        return coin
    state = coin.get_state()
    words = state[_HEAD : _HEAD + 8 * _WORDS].view(torch.int64)  # 32 bits in each
    if int(words[0]) != coin.initial_seed() % 2**32:
        raise FedsimError("this version of torch keeps the state of its generators differently.")
    drawn = hashlib.shake_256(secret.to_bytes(32, "big")).digest(4 * _WORDS)
    words.copy_(
        torch.tensor([int.from_bytes(drawn[at : at + 4]) for at in range(0, len(drawn), 4)])
    )
    return coin.set_state(state)


def training_seed(secret: int) -> int:
    """The seed of the training itself, for dropout: of a wide secret it tells nothing."""
    return secret if secret < _NARROW else seed_from(f"training {secret}")

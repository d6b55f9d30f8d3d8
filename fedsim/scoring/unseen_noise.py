"""Unseen noise: the canary of a client whose coins nobody else knows.

A client of somebody's own app that adds noise to its update cannot be replayed to the last digit.
What can be told is whether the noise that was declared is all that lies between the replay without
it and the update: it has a length that is known, and no direction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedsim.core.defense import Defense
from fedsim.core.learning import Update

SURE = 5.0  # deviations: by chance one in a million updates is further off


def quiet(defenses: Sequence[Defense]) -> tuple[list[Defense], float] | None:
    """The defenses without the noise that comes last of all, and its deviation; None where there is
    none of that kind."""
    if not defenses:
        return None
    found = defenses[-1].without_noise()
    return None if found is None else ([*defenses[:-1], found[0]], found[1])


def unexplained(replay: Update, observed: Update, deviation: float) -> float:
    """How much of the distance between the two, relative to the second, Gaussian noise of this
    deviation does not explain; 0 where it may be that noise alone. Numbers without a dimension are
    left out, because Flower's mods do not noise them."""
    names = [name for name, tensor in replay.tensors.items() if tensor.ndim]
    if replay.tensors.keys() != observed.tensors.keys() or not names:
        return 1.0
    own, seen = (_flat(update, names) for update in (replay, observed))
    apart, size = seen - own, float(seen.norm())
    if deviation <= 0 or size == 0:
        return float(apart.norm()) / size if size else float(apart.norm() > 0)
    # The squared length of n numbers of noise is n s^2, give or take sqrt(2 n) s^2; along any
    # direction that does not depend on it, noise is one number.
    count, variance = len(apart), deviation**2
    spread = abs(float(apart.square().sum()) - count * variance)
    length = math.sqrt(max(0.0, spread - SURE * math.sqrt(2 * count) * variance))
    along = abs(float(apart @ own)) / max(float(own.norm()), 1e-30)
    return max(length, max(0.0, along - SURE * deviation)) / size


def _flat(update: Update, names: Sequence[str]) -> Tensor:
    return torch.cat([update.tensors[name].detach().cpu().double().flatten() for name in names])

"""Privacy budgets: what differential privacy a spec's defenses promise after all its rounds."""

from __future__ import annotations

import math
from typing import Any

from fedsim.clients import shards_of
from fedsim.core.defense import Exposure
from fedsim.core.epochs import steps_of_round
from fedsim.core.spec import Spec
from fedsim.defenses.applied import declared


def exposures(spec: Spec) -> list[Exposure]:
    """How often each client's samples are used, client by client."""
    cohorts = [spec.cohort(round_) for round_ in range(1, spec.train.rounds + 1)]
    by_client = []
    for client, samples in enumerate(_samples(spec)):
        rounds, train = sum(client in cohort for cohort in cohorts), spec.train
        steps = steps_of_round(train.local_steps, train.local_epochs, samples, train.step_size)
        rate = min(1.0, train.step_size / samples)
        by_client.append(Exposure(rate, steps * rounds, rounds))
    return by_client


def _samples(spec: Spec) -> list[int]:
    """How many samples each client has; of a captured one it is known what the client counted, or
    that it has a batch."""
    if spec.captured is not None:
        return [spec.captured.examples or spec.train.step_size] * spec.data.clients
    return [len(shard) for shard in shards_of(spec.data, spec.seed)]


def budgets(spec: Spec) -> list[dict[str, Any]]:
    """For every defense that promises a budget: that of the client that spends most."""
    promises = []
    for component, defense in zip(spec.defenses, declared(spec.defenses), strict=True):
        each = [
            b for e in set(exposures(spec)) if e.rounds and (b := defense.budget(e)) is not None
        ]
        if each:
            worst = max(each, key=lambda budget: budget.epsilon)
            finite = math.isfinite(worst.epsilon)
            promises.append(
                {
                    "defense": component.name,
                    "epsilon": worst.epsilon if finite else None,  # None: no promise at all
                    "delta": worst.delta,
                    "protects": worst.protects,
                }
            )
    return promises

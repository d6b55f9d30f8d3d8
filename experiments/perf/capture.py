"""What capturing costs: rounds with capture on against rounds with it off, in blocks by turn.

    python experiments/perf/capture.py [key=value ...]

Prints the ratio of the median round times. Writing goes on beside the rounds, so the first round
of each block, which may still carry the writes of the block before, does not count.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fedsim.auditing import prepare
from fedsim.core.spec import load_spec
from fedsim.core.store import Run
from fedsim.server import AdversarialStrategy, create_strategy
from fedsim.simulation import ray_session, run_federation

SPEC = [
    "data={image_size: 224, clients: 4}",
    "model={name: vit_tiny_patch16_224}",
    "train={rounds: 32, evaluate: false, batch_size: 8}",
    "engine={kind: ray}",
]


BLOCK = 4


def captured(round_: int) -> bool:
    return (round_ - 1) // BLOCK % 2 == 1


def counts(round_: int) -> bool:
    return (round_ - 1) % BLOCK > 0


class InTurn(AdversarialStrategy):
    """Captures every other block of rounds."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.recorder.rounds = {server_round} if captured(server_round) else set()
        return super().configure_train(server_round, arrays, config, grid)


def main(overrides: list[str]) -> None:
    spec = load_spec({}, [*SPEC, *overrides])
    plan = prepare(spec)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ray_session(spec.engine):
        run = Run.create(Path(folder) / "run", spec)
        strategy = InTurn(create_strategy(spec), spec, run, plan.public, on_round=rows.append)
        run_federation(spec, run, strategy, plan.initial)
    times = {
        on: [r["seconds"] for r in rows if counts(r["round"]) and captured(r["round"]) is on]
        for on in (True, False)
    }
    on, off = (statistics.median(times[key]) for key in (True, False))
    print(
        f"{spec.model.name}@{spec.data.image_size} b{spec.train.batch_size}, "
        f"{spec.cohort_size} clients, {spec.engine.kind}: capture on / off = {on / off:.3f}x "
        f"(median of {len(times[True])} rounds each: {on:.2f} s and {off:.2f} s)"
    )


if __name__ == "__main__":
    main(sys.argv[1:])

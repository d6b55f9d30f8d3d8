"""What capturing costs: every round run twice, once captured and once not.

    python experiments/perf/capture.py [key=value ...]

Two simulations of the same federation, with capture on and off in alternating blocks, in the second
the other way round: so each round, with its own pictures, is timed both ways. Writing goes on
beside the rounds, so the first round of each block, which may still carry the writes of the block
before, does not count. Prints the median over the rounds of on / off.
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

from fedsim.campaign.plan import Plan, prepare
from fedsim.cluster.session import ray_session
from fedsim.core.run import Run
from fedsim.core.spec import load_spec
from fedsim.federation.aggregation import create_strategy
from fedsim.federation.engines import run_federation
from fedsim.federation.strategy import AdversarialStrategy

SPEC = [
    "data={image_size: 224, clients: 4}",
    "model={name: vit_tiny_patch16_224}",
    "train={rounds: 24, evaluate: false, batch_size: 8}",
    "engine={kind: ray}",
]
BLOCK = 4


class InTurn(AdversarialStrategy):
    """Captures every other block of rounds."""

    first_block = False

    def captures(self, round_: int) -> bool:
        return ((round_ - 1) // BLOCK % 2 == 0) is self.first_block

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.recorder.rounds = {server_round} if self.captures(server_round) else set()
        return super().configure_train(server_round, arrays, config, grid)


def simulate(plan: Plan, first_block: bool) -> dict[int, tuple[bool, float]]:
    """For each round that counts: whether it was captured, and its seconds."""
    spec, rows = plan.spec, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder, ray_session(spec.engine):
        run = Run.create(Path(folder) / "run", spec)
        strategy = InTurn(create_strategy(spec), spec, run, plan.public, on_round=rows.append)
        strategy.first_block = first_block
        run_federation(spec, run, strategy, plan.initial)
    return {
        row["round"]: (strategy.captures(row["round"]), row["seconds"])
        for row in rows
        if (row["round"] - 1) % BLOCK
    }


def main(overrides: list[str]) -> None:
    spec = load_spec({}, [*SPEC, *overrides])
    plan = prepare(spec)
    one, other = simulate(plan, True), simulate(plan, False)
    pairs = [sorted([one[r], other[r]]) for r in one]  # (off, on) of each round
    ratio = statistics.median(on / off for (_, off), (_, on) in pairs)
    seconds = statistics.median(off for (_, off), _ in pairs)
    print(
        f"{spec.model.name}@{spec.data.image_size} b{spec.train.batch_size}, "
        f"{spec.cohort_size} clients, {spec.engine.kind}: capture on / off = {ratio:.3f}x "
        f"(median of {len(pairs)} rounds of {seconds:.2f} s, each run both ways)"
    )


if __name__ == "__main__":
    main(sys.argv[1:])

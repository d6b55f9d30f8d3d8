"""What syncing costs a round: every round run twice, once with its files synced and once without.

    python -m experiments.perf.sync [key=value ...]

Two simulations of the same federation, with syncing on and off in alternating blocks, in the second
the other way round: so each round, with its own pictures, is timed both ways. Every update is
captured, and every client writes to its vault. The recorder writes beside the rounds, so the first
round of each block, which may still carry the writes of the block before, does not count. Prints
the median over the rounds of on / off.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fedsim.campaign.plan import prepare
from fedsim.cluster.session import ray_session
from fedsim.core import files
from fedsim.core.defense import Defense
from fedsim.core.run import Run
from fedsim.core.spec import Spec, load_spec
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
_sync = files.sync


class Turn:
    """Whose turn it is, in this process."""

    first = True  # whether the first block is synced
    round = 0  # the one under way, for files that belong to none

    @classmethod
    def synced(cls, round_: int) -> bool:
        return ((round_ - 1) // BLOCK % 2 == 0) is cls.first


@dataclass(frozen=True)
class InTurn(Defense):
    """Changes nothing: it is built in every process, and says there whose turn it is."""

    first: bool

    def __post_init__(self) -> None:
        Turn.first = self.first
        files.sync = sync


def sync(path: Path) -> None:
    """Sync in the rounds whose turn it is."""
    named = re.search(r"round-(\d+)", str(path))
    if Turn.synced(int(named[1]) if named else Turn.round):
        _sync(path)


class Turning(AdversarialStrategy):
    """Says in the server's process which round it is."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        Turn.round = server_round
        return super().configure_train(server_round, arrays, config, grid)


def simulate(spec: Spec) -> dict[int, tuple[bool, float]]:
    """For each round that counts: whether it was synced, and its seconds."""
    plan, rows = prepare(spec), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, ray_session(spec.engine):
        run = Run.create(Path(folder) / "run", spec)
        strategy = Turning(create_strategy(spec), spec, run, plan.public, on_round=rows.append)
        run_federation(spec, run, strategy, plan.initial)
    return {
        row["round"]: (Turn.synced(row["round"]), row["seconds"])
        for row in rows
        if (row["round"] - 1) % BLOCK
    }


def main(overrides: list[str]) -> None:
    words = [*SPEC, *overrides]
    one, other = (
        simulate(
            load_spec(
                {}, [*words, f"defenses=[{{name: 'experiments.perf.sync:InTurn', first: {first}}}]"]
            )
        )
        for first in ("true", "false")
    )
    pairs = [sorted([one[r], other[r]]) for r in one]  # (off, on) of each round
    ratio = statistics.median(on / off for (_, off), (_, on) in pairs)
    seconds = statistics.median(off for (_, off), _ in pairs)
    spec = load_spec({}, words)
    print(
        f"{spec.model.name}@{spec.data.image_size} b{spec.train.batch_size}, "
        f"{spec.cohort_size} clients, {spec.engine.kind}: synced / not = {ratio:.3f}x "
        f"(median of {len(pairs)} rounds of {seconds:.2f} s, each run both ways)"
    )


if __name__ == "__main__":
    from experiments.perf import sync as ours  # as the clients import it: one turn for all

    ours.main(sys.argv[1:])

"""What a warm cluster saves: a tiny federation on a Ray of its own against one that is up.

    python experiments/perf/warm.py [key=value ...]

Prints for both how long it takes until Ray can be used, and until the first round is done. The
cluster has served one run before it is timed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fedsim.audit.stages import federate
from fedsim.campaign.plan import prepare
from fedsim.campaign.progress import Silent
from fedsim.cluster import local
from fedsim.cluster.session import ray_session
from fedsim.core.spec import Spec, load_spec

SPEC = [
    "data={image_size: 32, clients: 1}",
    "model={name: vit_tiny_patch16_224, options: {patch_size: 8, depth: 2, embed_dim: 96}}",
    "train={rounds: 1, evaluate: false}",
]


class Clock(Silent):
    """Notes when the first round was done."""

    def __init__(self) -> None:
        self.began, self.seconds = time.perf_counter(), 0.0

    def round_done(self, row: dict[str, Any]) -> None:
        self.seconds = self.seconds or time.perf_counter() - self.began


def until_up(spec: Spec) -> float:
    """Seconds until a session is there."""
    began = time.perf_counter()
    with ray_session(spec.engine):
        return time.perf_counter() - began


def until_round(spec: Spec) -> float:
    """Seconds until the first round is done."""
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock()
        federate(spec, Path(folder) / "run", watch=clock)
        return clock.seconds


def main(overrides: list[str]) -> None:
    cold = load_spec({}, [*SPEC, "engine={kind: ray, device: cpu, cpus: 1}", *overrides])
    prepare(cold)
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "cluster.json"
        fresh = until_up(cold), until_round(cold)
        try:
            address = local.start(state, cpus=1).address
            warm = load_spec(cold.model_dump(mode="json"), [f"engine.address='{address}'"])
            until_round(warm)
            there = until_up(warm), until_round(warm)
        finally:
            local.stop(state)
    for what, a, b in zip(("until Ray is up", "until the first round"), fresh, there, strict=True):
        print(f"{what}: {a:.1f} s cold, {b:.1f} s warm, ratio {b / a:.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

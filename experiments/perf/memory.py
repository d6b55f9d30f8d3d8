"""How much the driver's memory grows over a federation: it must not grow with the clients.

    python experiments/perf/memory.py [key=value ...]

Prints the peak above the start, round by round; by default for 64 clients of a ViT-Ti.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from fedsim.auditing import federate
from fedsim.core.spec import load_spec
from fedsim.planning import prepare
from fedsim.watch import Silent

SPEC = [
    "data={image_size: 224, clients: 64}",
    "model={name: vit_tiny_patch16_224}",
    "train={rounds: 2, evaluate: false}",
    "engine={kind: ray}",
]


def resident() -> float:
    """Megabytes this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


class Sampler(Silent):
    """Prints the peak after each round."""

    def __init__(self, start: float):
        self.start = start

    def round_done(self, row: dict[str, Any]) -> None:
        print(
            f"round {row['round']}: {row['clients']} clients, "
            f"{row['bytes'] / 2**20:.0f} MB received, "
            f"driver peak {peak() - self.start:.0f} MB above its start",
            flush=True,
        )


def main(overrides: list[str]) -> None:
    spec = load_spec({}, [*SPEC, *overrides])
    prepare(spec)
    start = resident()
    with tempfile.TemporaryDirectory() as folder:
        federate(spec, Path(folder) / "run", watch=Sampler(start))
    print(
        f"{spec.model.name}, {spec.cohort_size} clients: driver {start:.0f} MB at the start, "
        f"peak {peak() - start:.0f} MB above it"
    )


if __name__ == "__main__":
    main(sys.argv[1:])

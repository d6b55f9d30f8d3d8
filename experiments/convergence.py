"""How fast searches come down: their matching loss at shares of their steps (Fig. A4 of GIAS).

    python -m experiments.convergence RUN

One row per attack of a finished audit that kept a trace: the mean over batches of its least loss
so far after a tenth, a quarter, half and all of its steps, with 95 % intervals.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from experiments.table import interval
from fedsim.campaign.plan import jobs_of, victims
from fedsim.core.run import Run
from fedsim.report.content import traces_and_notes

SHARES = (0.1, 0.25, 0.5, 1.0)


def at_shares(trace: list[tuple[int, float]]) -> list[float]:
    """The least loss of a trace until each share of its steps."""
    last = trace[-1][0]
    return [
        min(loss for step, loss in trace if step <= max(share * last, trace[0][0]))
        for share in SHARES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    run = Run(parser.parse_args().run)
    traces, _ = traces_and_notes(jobs_of(run, run.spec, victims(run.spec)), run.spec.seed)
    print("| loss of | " + " | ".join(f"after {share:.0%}" for share in SHARES) + " |")
    print("|---|" + "---|" * len(SHARES))
    for attack, several in traces.items():
        losses = np.array([at_shares(trace) for trace in several])
        print(f"| {attack} | {' | '.join(interval(column, 3) for column in losses.T)} |")


if __name__ == "__main__":
    main()

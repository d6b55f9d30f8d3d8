"""Measurement of every missing cell, in this process or side by side on Ray; then the report.

A cell writes its own directories, ``DIR/cells/CELL`` and ``DIR/utility/CELL``, and is resumed like
any run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import ray

from fedsim.audit.cost import upload_bytes
from fedsim.audit.stages import audit, federate
from fedsim.bench.cells import Bench, Cell
from fedsim.bench.doubts import doubt_of, legend_of
from fedsim.bench.stealth import COLUMNS, loudness_in, write_stealth
from fedsim.bench.suites import envelope_in, suite_outcomes, suite_rows
from fedsim.bench.table import aggregate, as_markdown
from fedsim.campaign.plan import prepare
from fedsim.cluster.local import ATTACK_RESOURCE
from fedsim.cluster.session import ray_session, worker_gpus
from fedsim.core.device import threads
from fedsim.core.errors import FedsimError, RunError, SpecError
from fedsim.core.files import read_json, write_atomically, write_json
from fedsim.core.metrics import METRICS
from fedsim.core.run import Run
from fedsim.core.text import encoded
from fedsim.report.headline import baseline_of
from fedsim.scoring.budgets import budgets
from fedsim.scoring.recovery import FLAT, FLAT_ORIGINAL, FLAT_SSIM, ORIGINAL

Told = Callable[[int, int, str], None]  # cells done, of how many, which


@dataclass(frozen=True)
class Measured:
    """One cell: every picture's scores, what each attack came to, and what the defense costs."""

    pictures: pd.DataFrame
    outcomes: pd.DataFrame  # a row per attack: its verdict, and the cell's cost
    guards: pd.DataFrame  # a row per guard: how loud the server was to it


def conduct(
    bench: Bench, root: str | Path, *, progress: Told = lambda done, total, cell: None
) -> pd.DataFrame:
    """`fedsim bench`: every cell that is missing, then table, frontier and report."""
    from fedsim.bench.report import write_bench_report

    root = Path(root)
    cells = list(bench.cells())
    for cell in cells:
        prepare(bench.attacked(cell), willing=True)
    _claim(root, bench)
    done: dict[Cell, Measured] = {}
    progress(0, len(cells), "starting")
    for cell, measured in _each(bench, cells, root.absolute()):
        done[cell] = measured
        progress(len(done), len(cells), cell.label)
    pictures = pd.concat([done[cell].pictures for cell in cells], ignore_index=True)
    outcomes = pd.concat([done[cell].outcomes for cell in cells], ignore_index=True)
    table = aggregate(pictures, outcomes)
    for name, frame in (("pictures", pictures), ("cells", outcomes), ("table", table)):
        write_atomically(root / f"{name}.csv", encoded(frame.to_csv(index=False)))
    legend = "".join(f"\n{line}\n" for line in legend_of(table))
    write_atomically(root / "table.md", encoded(as_markdown(table) + legend))
    guards = pd.concat([done[cell].guards for cell in cells], ignore_index=True)
    write_stealth(root, guards, table)
    write_bench_report(bench, root, table, as_markdown(table))
    return table


def _each(bench: Bench, cells: list[Cell], root: Path) -> Iterator[tuple[Cell, Measured]]:
    """Every cell with what was measured, as they finish."""
    engine = bench.spec.engine
    if engine.kind == "inline":
        for cell in cells:
            yield cell, measure(bench, cell, root)
        return
    with ray_session(engine):
        task = ray.remote(_measure_elsewhere).options(
            num_cpus=0,
            num_gpus=worker_gpus(engine),
            resources={ATTACK_RESOURCE: 1},
            max_retries=engine.retries,
        )
        cpus = engine.cpus or os.cpu_count() or 1
        share = max(1, cpus // engine.attack_workers)
        waiting = {task.remote(bench, cell, root, share): cell for cell in cells}
        while waiting:
            finished, _ = ray.wait(list(waiting), timeout=0.5)  # so that Ctrl-C gets through
            for future in finished:
                cell = waiting.pop(future)
                yield cell, _fetched(future, cell)


def _measure_elsewhere(bench: Bench, cell: Cell, root: Path, share: int) -> Measured | str:
    """In a Ray worker; an error meant for the user comes back as its sentence."""
    with threads(share):
        try:
            return measure(bench, cell, root)
        except FedsimError as error:
            return str(error)


def _fetched(future: Any, cell: Cell) -> Measured:
    try:
        result: Measured | str = ray.get(future)
    except ray.exceptions.RayError as error:
        first = str(error).strip().splitlines()[-1]
        raise RunError(f"the cell '{cell.label}' could not be done: {first}") from error
    if isinstance(result, str):
        raise RunError(f"the cell '{cell.label}': {result}")
    return result


def measure(bench: Bench, cell: Cell, root: Path) -> Measured:
    """One cell, from its directories where it is done already. Those of another cell are refused,
    and what is not as it was left is worked out again."""
    run, attacked = Run(root / "cells" / cell.folder), bench.attacked(cell)
    run.refuse_other(attacked)
    if not run.is_concluded(attacked):
        audit(attacked, run.root, willing=True)
    trained = run
    if bench.section.utility:
        trained = Run(root / "utility" / cell.folder)
        federate(bench.trained(cell), trained.root)
    about: dict[str, Any] = {"defense": cell.defense, "strength": cell.strength, "seed": cell.seed}
    cost = _cost(trained, bench.section.target_accuracy)
    summary = run.summary
    suite, failed = summary.get("suite"), summary.get("failed_jobs", [])
    members = {member["attack"] for member in suite["members"]} if suite else set()
    lines = suite_outcomes(suite, summary["verdicts"], failed, envelope_in(run)) if suite else []
    lines += [
        {
            "attack": v["attack"],
            "baseline": v["attack"] == baseline_of(summary),
            "verdict": v["verdict"],
            "doubt": doubt_of(v, failed),
            "victims": v.get("victims", 0),
            "victims_of": v.get("victims_of", v.get("victims", 0)),
        }
        for v in summary["verdicts"]
        if v["attack"] not in members
    ]
    outcomes = [{**about, "flags": "", **line, **cost} for line in lines]
    scores = run.scores
    if suite:
        scores = pd.concat([suite_rows(run, suite), scores], ignore_index=True)
    # A cell measured before a metric was added has none of it.
    pictures = scores.reindex(columns=_columns())
    for at, (name, value) in enumerate(about.items()):
        pictures.insert(at, name, value)
    guards = pd.DataFrame(loudness_in(summary, about), columns=COLUMNS)
    return Measured(pictures, pd.DataFrame(outcomes), guards)


def _columns() -> list[str]:
    """What the table takes over from scores.csv, a line for each reconstructed picture."""
    return [
        *("attack", "round", "client", "image", "trial", "seconds"),
        *METRICS,
        *("identified", "label_true", "label_recovered", "picture"),
        *(ORIGINAL, FLAT_ORIGINAL, FLAT, FLAT_SSIM, "digest", "member"),
    ]


def _cost(run: Run, target: float | None) -> dict[str, Any]:
    """Accuracy at the end, what a round takes, and the privacy budget."""
    rounds, spec = run.rounds, run.spec
    accuracy = rounds["test_accuracy"]
    reached = (
        rounds.loc[accuracy >= target, "round"] if target is not None else pd.Series(dtype=int)
    )
    promised = [budget["epsilon"] for budget in budgets(spec) if budget["epsilon"] is not None]
    return {
        "accuracy": float(accuracy.iloc[-1]) if accuracy.notna().any() else None,
        "rounds_to_target": int(reached.iloc[0]) if len(reached) else None,
        "bytes_a_round": int(rounds["bytes"].mean()),
        "upload_bytes": upload_bytes(run),
        "round_seconds": float(rounds["seconds"].median()),
        "epsilon": min(promised) if promised else None,
    }


def _claim(root: Path, bench: Bench) -> None:
    """Refuse the directory of another bench."""
    about = {
        "spec": bench.spec.model_dump(mode="json", exclude={"engine"}),
        "bench": bench.section.model_dump(mode="json", by_alias=True),
    }
    path = root / "bench.json"
    if path.is_file() and read_json(path) != json.loads(json.dumps(about)):
        raise SpecError(f"'{root}' already holds another bench; give another directory.")
    write_json(path, about)

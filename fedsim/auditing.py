"""Auditing: rounds, attacks, scores, verdict. Every step does only what is still missing."""

from __future__ import annotations

import json
import platform
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from clients.shards import images_of
from fedsim.budgets import budgets
from fedsim.core.attack import Reconstruction
from fedsim.core.errors import RunError
from fedsim.core.metrics import SMALLEST, lpips_unavailable
from fedsim.core.observation import address_of, is_finite, list_observations
from fedsim.core.spec import Spec
from fedsim.core.store import Run, write_json
from fedsim.identification import identification_of
from fedsim.jobs import Handout, Job
from fedsim.oracles import secrets_of
from fedsim.planning import (
    Plan,
    after_lessons,
    jobs_of,
    labelled_attacks,
    lessons_of,
    load_surrogate,
    memories,
    observed_rounds,
    prepare,
    victims,
)
from fedsim.scoring import failures, score_jobs
from fedsim.server import AdversarialStrategy, create_strategy, read_checkpoint
from fedsim.simulation import ray_session, run_federation
from fedsim.statistics import compare, over_rounds, population
from fedsim.verdict import BASELINE, summarise
from fedsim.watch import Silent, Watch
from fedsim.workers import InlinePool, Pool, RayPool


def federate(spec: Spec, root: str | Path, *, watch: Watch | None = None) -> Run:
    """`fedsim run`: the rounds and their observations, no attack."""
    plan, run = _open(spec, root)
    watch = watch or Silent()
    _note_skipped(run, spec)
    if len(read_checkpoint(run)[0]) < spec.train.rounds:
        strategy = _strategy(plan, run, watch)
        with watch.running(spec.train.rounds, strategy.rounds_done), _engine(spec):
            run_federation(spec, run, strategy, plan.initial)
    _require_observations(run)
    return run


def audit(spec: Spec, root: str | Path, *, watch: Watch | None = None) -> Run:
    """`fedsim audit`: rounds, attacks beside them, scores, verdict, report."""
    plan, run = _open(spec, root)
    watch = watch or Silent()
    _note_skipped(run, spec)
    began = time.perf_counter()
    waiting = set(victims(spec))
    with _engine(spec):
        pool = _pool(spec, run, watch)

        def attack(round_: int, client: int) -> None:
            # Once each: a round that was cut short left observations and is done again.
            if (round_, client) in waiting:
                waiting.remove((round_, client))
                for job in jobs_of(run, spec, [(round_, client)]):
                    pool.submit(after_lessons(run, spec, job))

        def teach(round_: int) -> None:
            for lesson in lessons_of(run, spec, [round_]):
                pool.submit(lesson)

        try:
            for path in list_observations(run.observations):
                if is_finite(path):
                    attack(*address_of(path))
            strategy = _strategy(plan, run, watch, on_observation=attack, on_committed=teach)
            for round_ in range(1, strategy.rounds_done + 1):
                if round_ in observed_rounds(spec):
                    teach(round_)
            with watch.running(spec.train.rounds, strategy.rounds_done):
                if strategy.rounds_done < spec.train.rounds:
                    run_federation(spec, run, strategy, plan.initial, afterwards=pool.drain)
                else:
                    pool.drain()
        finally:
            pool.close()
    _require_observations(run)
    conclude(run, seconds=time.perf_counter() - began, watch=watch)
    return run


def conclude(
    run: Run,
    *,
    seconds: float | None = None,
    watch: Watch | None = None,
    redacted: bool = False,
) -> Path:
    """Scores, summary and report from what the run directory holds; the report's path."""
    from fedsim.report import write_report

    spec = run.spec
    jobs = jobs_of(run, spec, victims(spec))
    with (watch or Silent()).scoring():
        identification = identification_of(spec)
        scores = score_jobs(run, jobs, identification.gallery)
        run.write_table("scores", scores, parquet=True)
        labels = [label for label, _ in labelled_attacks(spec)]
        failed = failures(jobs)
        summary = {
            "name": spec.name,
            "spec_digest": spec.digest(),
            "threat": spec.threat.model,
            "oracle_labels": spec.threat.oracle_labels,
            "verdicts": summarise(
                scores, spec, labels, _ledgers(run, jobs), failed, identification.about
            ),
            "comparisons": compare(scores, labels, spec.seed),
            "population": population(scores, BASELINE),
            "over_rounds": over_rounds(scores, _rounds(run), spec.seed),
            "failed_jobs": failed,
            "events": run.events(),
            "privacy": budgets(spec),
            "unavailable": {
                "lpips": _lpips_missing(spec),
                "identified": identification.reason,
            },
            "versions": versions(),
            "seconds": round(seconds, 1) if seconds is not None else _seconds_before(run),
        }
        write_json(run.root / "summary.json", summary)
        return write_report(run, jobs, redacted=redacted)


def _rounds(run: Run) -> pd.DataFrame:
    """The rounds of the run; none where the observations came from elsewhere."""
    try:
        return run.rounds
    except RunError:
        return pd.DataFrame(columns=["round"])


def _lpips_missing(spec: Spec) -> str | None:
    side = spec.data.image_size
    if side < SMALLEST:
        return f"LPIPS looks at pictures of {SMALLEST} pixels and more, and these have {side}"
    return lpips_unavailable()


def versions() -> dict[str, str]:
    names = ["fedsim", "torch", "timm", "flwr", "ray", "numpy", "scikit-image"]
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _open(spec: Spec, root: str | Path) -> tuple[Plan, Run]:
    if Path(root).exists():
        Run.create(root, spec)  # another spec's directory is refused before the slow checks
    plan = prepare(spec)
    return plan, Run.create(root, spec)


def _strategy(plan: Plan, run: Run, watch: Watch, **calls: Any) -> AdversarialStrategy:
    return AdversarialStrategy(
        create_strategy(plan.spec),
        plan.spec,
        run,
        plan.public,
        rounds=observed_rounds(plan.spec),
        on_round=watch.round_done,
        **calls,
        stop=threading.Event(),
    )


def _engine(spec: Spec) -> AbstractContextManager[None]:
    return ray_session(spec.engine) if spec.engine.kind == "ray" else nullcontext()


def _pool(spec: Spec, run: Run, watch: Watch) -> Pool:
    handout = Handout(spec.threat, spec.seed, spec.engine.device, load_surrogate(spec))
    kind = RayPool if spec.engine.kind == "ray" else InlinePool
    return kind(spec, handout, watch, secrets_of(spec, run))


def _require_observations(run: Run) -> None:
    if list_observations(run.observations):
        return
    reasons = [event["message"] for event in run.events()] or ["no client answered"]
    raise RunError(f"no update was observed in any audited round: {reasons[0]}")


def _note_skipped(run: Run, spec: Spec) -> None:
    for split in ("train", "test") if spec.train.evaluate else ("train",):
        skipped = images_of(spec.data, split).skipped
        if skipped:
            names = ", ".join(skipped[:3]) + (" ..." if len(skipped) > 3 else "")
            words = "damaged picture was" if len(skipped) == 1 else "damaged pictures were"
            run.note("pictures_skipped", f"{len(skipped)} {words} skipped: {names}")


def _ledgers(run: Run, jobs: list[Job]) -> dict[str, list[str]]:
    """What each attack read, over all its jobs."""
    read: dict[str, list[str]] = {}
    for job in jobs:
        if job.result.is_file():
            own = read.setdefault(job.label, [])
            own += [field for field in Reconstruction.load(job.result).ledger if field not in own]
    for label, memory in memories(run, run.spec).items():  # what it learned from counts as well
        for lesson in sorted(memory.glob("lesson-????.json")):
            own = read.setdefault(label, [])
            own += [f for f in json.loads(lesson.read_text())["ledger"] if f not in own]
    return read


def _seconds_before(run: Run) -> float | None:
    path = run.root / "summary.json"
    return run.summary.get("seconds") if path.is_file() else None

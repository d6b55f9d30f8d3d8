"""Stages of an audit: rounds, attacks, scores, report. What is done is not done again."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.audit.checkout import commit_of
from fedsim.audit.repair import drop_unusable, mend
from fedsim.audit.trust import named_in, refuse_other_code, refuse_strangers
from fedsim.campaign.granted_truth import secrets_of
from fedsim.campaign.jobs import Handout, Job
from fedsim.campaign.plan import (
    Plan,
    after_lessons,
    awaits_rounds,
    baseline_label,
    jobs_of,
    labelled_attacks,
    lessons_of,
    load_surrogate,
    memories,
    observed_rounds,
    prepare,
    taught_rounds,
    victims,
)
from fedsim.campaign.pools import InlinePool, Pool, RayPool
from fedsim.campaign.progress import Silent, Watch
from fedsim.campaign.surrogate import find_surrogate
from fedsim.clients import images_of
from fedsim.cluster.session import ray_session, refuse_silence
from fedsim.core.errors import DamagedError, FedsimError, RunError
from fedsim.core.files import read_json, write_json
from fedsim.core.metrics import METRICS
from fedsim.core.observation import is_finite, recorded_classes
from fedsim.core.run import (
    Run,
    address_of,
    list_lessons,
    list_observations,
    observation_path,
)
from fedsim.core.run.paths import ENVELOPE
from fedsim.core.spec import Spec
from fedsim.core.vault import Vault
from fedsim.federation.aggregation import create_strategy, masking
from fedsim.federation.checkpoint import read_checkpoint
from fedsim.federation.engines import run_federation
from fedsim.federation.strategy import AdversarialStrategy
from fedsim.scoring.budgets import budgets
from fedsim.scoring.envelope import envelope_of, excused_tries, marked, suite_account
from fedsim.scoring.identification import identification_of
from fedsim.scoring.lineup import chances
from fedsim.scoring.membership import TABLE, add_membership, membership_of
from fedsim.scoring.scores import failures, results_of, score_jobs, spared
from fedsim.scoring.statistics import compare, over_rounds, population
from fedsim.scoring.unscored import name_misdeclared, unscored, witnessed
from fedsim.scoring.verdict import asked_of, summarise
from fedsim.scoring.vigilance import noticed, refused_in, server_account


def federate(spec: Spec, root: str | Path, *, watch: Watch | None = None) -> Run:
    """`fedsim run`: the rounds and their observations, no attack."""
    watch = watch or Silent()
    with _opened(spec, root, willing=True) as (plan, run):  # nobody is asked to attack
        if len(read_checkpoint(run).rows) < spec.train.rounds:
            _refuse_to_simulate(run)
            strategy = _strategy(plan, run, watch)
            with watch.running(spec.train.rounds, strategy.rounds_done), _engine(spec):
                run_federation(spec, run, strategy, plan.initial)
        _require_observations(run)
    return run


def audit(
    spec: Spec, root: str | Path, *, watch: Watch | None = None, willing: bool = False
) -> Run:
    """`fedsim audit`: rounds, attacks beside them, scores, verdict, report.

    ``willing``: an attack that cannot work on the model is no mistake, and declines."""
    watch = watch or Silent()
    began = time.perf_counter()
    with _opened(spec, root, willing=willing) as (plan, run):
        with _engine(spec):
            _attack(plan, run, watch)
        _require_observations(run)
        conclude(run, seconds=time.perf_counter() - began, watch=watch)
    return run


def attack_captured(root: str | Path, *, watch: Watch | None = None, trust: bool = False) -> Run:
    """The attacks on what a server captured, and no score: that takes the clients' vaults.

    ``trust``: what the directory names by import path may be imported.
    """
    captured = Run.open(root)
    refuse_strangers(captured.root, named_in(captured), trust=trust)
    spec = captured.spec
    with _opened(spec, root) as (plan, run):
        with _engine(spec):
            _attack(plan, run, watch or Silent())
        _require_observations(run)
    return run


def _attack(plan: Plan, run: Run, watch: Watch) -> None:
    """The rounds that are missing, and beside them the attacks that are."""
    spec = plan.spec
    waiting, observed = set(victims(spec)), observed_rounds(spec)
    pool = _pool(spec, run, watch)

    def attack(round_: int, client: int) -> None:
        if (round_, client) in waiting:
            waiting.remove((round_, client))
            for job in jobs_of(run, spec, [(round_, client)]):
                drop_unusable(run, job)
                taught = taught_rounds(job.attack, spec)
                pool.submit(after_lessons(job, run.learned.absolute(), taught))

    # One of the uploads that a cohort masked together means nothing before all are there, nor is
    # what an attack makes of the others the same whenever it is asked.
    together = masking(spec) is not None or awaits_rounds(spec)

    def capture(round_: int, client: int) -> None:
        if not together:
            attack(round_, client)

    def teach(round_: int) -> None:
        for client in spec.cohort(round_) if together else []:
            if _is_kept(run, round_, client):
                attack(round_, client)
        for lesson in lessons_of(run, spec, [round_]):
            pool.submit(lesson)

    try:
        strategy = _strategy(plan, run, watch, on_observation=capture, on_committed=teach)
        for path in list_observations(run.observations):
            # A round that was cut short left observations too, and is done again.
            if address_of(path)[0] <= strategy.rounds_done and is_finite(path):
                attack(*address_of(path))
        for round_ in range(1, strategy.rounds_done + 1):
            if round_ in observed:
                teach(round_)
        with watch.running(spec.train.rounds, strategy.rounds_done):
            if strategy.rounds_done < spec.train.rounds:
                _refuse_to_simulate(run)
                run_federation(spec, run, strategy, plan.initial, afterwards=pool.drain)
            else:
                pool.drain()
    finally:
        pool.close()


def conclude(
    run: Run,
    *,
    seconds: float | None = None,
    watch: Watch | None = None,
    redacted: bool = False,
) -> Path:
    """Scores, summary and report from what the run directory holds; returns the report's path."""
    from fedsim.report import write_report

    spec = run.spec
    if run.deployed and spec.captured is None and not run.vault.is_dir():
        raise RunError(
            f"the truth of '{run.root}' is with its clients; gather their vaults: fedsim score "
            f"{run.root} --vault DIR --vault DIR -o DIR."
        )
    Vault(run.vault).keys.require()
    jobs = jobs_of(run, spec, victims(spec))
    scored = [job for job in jobs if spec.captured is None or witnessed(run, job)]
    with (watch or Silent()).scoring():
        if run.classes is not None and spec.audit.gallery:  # its server had no data set to look in
            _note_skipped(run, spec)
        if run.classes is not None and spec.captured is None:
            _note_shared(run, spec, "and its attacks had them")
        identification = identification_of(spec)
        scores = score_jobs(run, scored, identification.gallery)
        envelope = envelope_of(run, jobs, scores)
        if not envelope.empty:
            scores = marked(scores, envelope)
            run.write_table("envelope", envelope)
        else:  # nor is that of an earlier time one of these scores
            (run.root / ENVELOPE).unlink(missing_ok=True)
        run.write_table("scores", scores, parquet=True)
        labels, baseline = [label for label, _ in labelled_attacks(spec)], baseline_label(spec)
        failed = failures(jobs)
        excused = excused_tries(spec, spared(jobs), refused_in(run))
        verdicts = summarise(
            scores,
            spec,
            labels,
            _ledgers(run, jobs),
            failed,
            chances(run, jobs, scores, identification.gallery),
            asked_of(spec, refused_in(run)),
            _classes(run),
            unscored=unscored(run, jobs) if spec.captured is not None and not scored else None,
            excused=excused,
        )
        if len(told := membership_of(run, jobs)):
            run.write_table(TABLE, told)
            add_membership(verdicts, told)
        suite = suite_account(run, jobs, scores, envelope, verdicts, excused)
        if spec.captured is not None:
            name_misdeclared(run, scores, verdicts)
        guesses = {e["attack"] for e in verdicts if not e.get("looked", True)} - {baseline}
        summary = {
            "name": spec.name,
            "spec_digest": spec.digest(),
            "scores_digest": run.scores_digest(),
            "threat": spec.threat.model,
            "oracle_labels": spec.threat.oracle_labels,
            "baseline": baseline,
            "verdicts": verdicts,
            **({} if suite is None else {"suite": suite}),
            "comparisons": compare(scores, labels),
            "population": population(scores[~scores["attack"].isin(guesses)], baseline or ""),
            "over_rounds": over_rounds(scores, _rounds(run)),
            "failed_jobs": failed,
            "server": server_account(run, spec, _rounds(run)),
            "noticed": noticed(run, spec),
            "events": run.events(),
            "privacy": budgets(spec),
            "unavailable": {
                **_metrics_missing(spec.data.image_size),
                "identified": identification.reason,
            },
            "versions": versions(),
            "seconds": round(seconds, 1) if seconds is not None else _seconds_before(run),
        }
        write_json(run.summary_path, summary)
        return write_report(run, jobs, redacted=redacted)


def _rounds(run: Run) -> pd.DataFrame:
    """The rounds of the run; an empty table where none was recorded, or none can be read."""
    try:
        return run.rounds
    except RunError:
        return pd.DataFrame(columns=["round"])
    except DamagedError as error:
        run.note("damaged", f"the rounds are left out: {error}")
        return pd.DataFrame(columns=["round"])


def _metrics_missing(side: int) -> dict[str, str | None]:
    """Why metrics that cannot be computed everywhere are missing here; None where they are not."""
    return {metric.name: metric.missing(side) for metric in METRICS.values() if metric.unavailable}


def versions() -> dict[str, str]:
    names = ["fedsim", "torch", "timm", "flwr", "ray", "numpy", "scikit-image"]
    commit = commit_of()
    told = {"python": platform.python_version(), **{name: version(name) for name in names}}
    return told | ({"commit": commit} if commit is not None else {})


@contextmanager
def _opened(spec: Spec, root: str | Path, *, willing: bool = False) -> Iterator[tuple[Plan, Run]]:
    """A run in which nobody else works, set right where it was damaged."""
    Run(root).refuse_other(spec)  # before the slow checks
    refuse_other_code(Run(root), spec)
    refuse_silence(spec.engine)
    begun = Run(root).classes
    plan = prepare(spec, begun, willing=willing or begun is not None)
    with Run(root).locked():
        run = Run.create(root, spec)
        mend(run, spec, plan.public.num_classes)
        if run.classes is None:
            _note_skipped(run, spec)
            _note_shared(run, spec, "and were left out")
        yield plan, run


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
        active=plan.active(at_hand=run.classes is None),
    )


def _engine(spec: Spec) -> AbstractContextManager[None]:
    return ray_session(spec.engine) if spec.engine.kind == "ray" else nullcontext()


def _pool(spec: Spec, run: Run, watch: Watch) -> Pool:
    surrogate = load_surrogate(spec, at_hand=run.classes is None)
    handout = Handout(spec.threat, spec.seed, spec.engine.device, surrogate)
    kind = RayPool if spec.engine.kind == "ray" else InlinePool
    return kind(spec, handout, watch, secrets_of(spec, run), tell=run.note)


def _refuse_to_simulate(run: Run) -> None:
    if run.deployed:
        raise RunError(
            f"'{run.root}' is of clients elsewhere and some of its rounds are missing; go on with "
            f"the `fedsim deploy` that began it."
        )


def _is_kept(run: Run, round_: int, client: int) -> bool:
    """Whether an observation is there that can be attacked."""
    path = observation_path(run.observations, round_, client).with_suffix(".json")
    return path.is_file() and is_finite(path)


def _require_observations(run: Run) -> None:
    if list_observations(run.observations):
        return
    if refused_in(run):
        return  # that nobody uploads is what their guards are for
    reasons = [event["message"] for event in run.events()] or ["no client answered"]
    raise RunError(f"no update was observed in any audited round: {reasons[0]}")


def _note_skipped(run: Run, spec: Spec) -> None:
    for split in ("train", "test") if spec.train.evaluate else ("train",):
        skipped = images_of(spec.data, split).skipped
        if skipped:
            names = ", ".join(skipped[:3]) + (" ..." if len(skipped) > 3 else "")
            words = "damaged picture was" if len(skipped) == 1 else "damaged pictures were"
            run.note("pictures_skipped", f"{len(skipped)} {words} skipped: {names}")


def _note_shared(run: Run, spec: Spec, outcome: str) -> None:
    """Tell which of the attacker's own pictures are the clients'."""
    found = find_surrogate(spec, victims(spec))
    words = found.words(outcome) if found is not None else None
    if words is not None:
        run.note("surrogate_shared", words)


def _classes(run: Run) -> int | None:
    """Of how many classes the pictures are; None where no observation tells."""
    told = (recorded_classes(path) for path in list_observations(run.observations))
    return next((classes for classes in told if classes is not None), None)


def _ledgers(run: Run, jobs: list[Job]) -> dict[str, list[str]]:
    """What each attack read, over all its jobs."""
    read: dict[str, list[str]] = {}
    for job, result in results_of(jobs, run.spec.seed):
        fields = read.setdefault(job.label, [])
        fields += [field for field in result.ledger if field not in fields]
    for label, memory in memories(run, run.spec).items():  # what it learned from counts as well
        for lesson in list_lessons(memory):
            fields = read.setdefault(label, [])
            try:
                ledger = list(read_json(lesson)["ledger"])
            except (DamagedError, KeyError, TypeError) as error:
                run.note("damaged", f"what '{label}' read for a lesson is not told: {error}")
                continue
            fields += [f for f in ledger if f not in fields]
    return read


def _seconds_before(run: Run) -> float | None:
    try:
        return run.summary.get("seconds")
    except FedsimError:  # there is none yet, or it is damaged
        return None

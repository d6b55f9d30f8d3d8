"""Auditing: rounds, attacks, scores, verdict. Every step does only what is still missing."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attacks import create_attack
from clients.datasets import load_images
from clients.shards import check_shards, images_of
from defenses import create_defenses
from fedsim.core.attack import Reconstruction
from fedsim.core.device import resolve_device
from fedsim.core.errors import NotGranted, RunError, SpecError
from fedsim.core.knowledge import FIELDS, THREATS, granted_by
from fedsim.core.metrics import lpips_unavailable
from fedsim.core.models import build_model
from fedsim.core.observation import Public, address_of, is_finite, list_observations
from fedsim.core.prior_networks import load_prior
from fedsim.core.spec import Component, DataSpec, Spec
from fedsim.core.store import Run, write_json
from fedsim.oracles import secrets_of
from fedsim.scoring import failures, score_jobs
from fedsim.server import AdversarialStrategy, cohort, create_strategy, read_checkpoint
from fedsim.simulation import ray_session, run_federation
from fedsim.verdict import BASELINE, summarise
from fedsim.watch import Silent, Watch
from fedsim.workers import Handout, InlinePool, Job, Pool, RayPool

SURROGATE_LIMIT = 512


@dataclass(frozen=True)
class Plan:
    """A spec that was checked against everything it names, and the model it starts from."""

    spec: Spec
    public: Public
    initial: dict[str, Tensor]


def prepare(spec: Spec) -> Plan:
    """Find every mistake that can be found before a round runs."""
    for _, component in labelled_attacks(spec):
        check_needs(component, spec)
    defenses = create_defenses(spec.defenses)
    create_strategy(spec)
    resolve_device(spec.engine.device)
    classes = len(images_of(spec.data, "train").classes)
    check_shards(spec)
    _check_surrogate(spec)
    _check_prior(spec)
    model = build_model(
        spec.model, image_size=spec.data.image_size, num_classes=classes, seed=spec.seed
    )
    for defense in defenses:
        model = defense.prepare_model(model)
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return Plan(spec, Public.of(spec, classes), initial)


def check_needs(component: Component, spec: Spec) -> None:
    """Refuse an attack that needs what the threat model does not grant."""
    attack = create_attack(component.name, **component.params)
    granted = Handout(spec.threat, 0, "cpu").granted
    lacking = sorted(attack.needs - granted)
    if lacking:
        enough = [t.letter for t in THREATS.values() if attack.needs <= t.grants]
        advice = f"; threat {enough[0]} does" if enough else ""
        raise NotGranted(
            f"the attack '{component.name}' needs {', '.join(lacking)} ({FIELDS[lacking[0]]}), "
            f"which threat {spec.threat.model} does not grant{advice}."
        )


def labelled_attacks(spec: Spec) -> list[tuple[str, Component]]:
    """The spec's attacks with a name of their own each, and the baseline where it is granted."""
    labelled: list[tuple[str, Component]] = []
    for component in spec.attacks:
        short = component.short_name
        taken = [label for label, _ in labelled]
        count = sum(1 for label in taken if label == short or label.startswith(f"{short}-"))
        labelled.append((f"{short}-{count + 1}" if count else short, component))
    baseline = Component(name=BASELINE)
    grants = granted_by(spec.threat)
    if BASELINE not in [label for label, _ in labelled] and "image_size" in grants:
        labelled.append((BASELINE, baseline))
    return labelled


def victims(spec: Spec) -> list[tuple[int, int]]:
    """Which (round, client) are attacked: spread over the rounds, by seed, before any result."""
    orders = []
    for round_ in spec.audited_rounds:
        coin = np.random.default_rng([spec.seed, 11, round_])
        orders.append([(round_, int(c)) for c in coin.permutation(cohort(spec, round_))])
    wanted = spec.audit.victims or sum(len(order) for order in orders)
    spread = [order[i] for i in range(spec.cohort_size) for order in orders]
    return sorted(spread[:wanted])


def jobs_of(run: Run, spec: Spec, chosen: Iterable[tuple[int, int]]) -> list[Job]:
    """Every job of these victims, attack by attack."""
    chosen = list(chosen)
    return [
        Job(
            run.observations.absolute(),
            run.reconstructions.absolute(),
            round_,
            client,
            component,
            label,
            trial,
        )
        for label, component in labelled_attacks(spec)
        for round_, client in chosen
        for trial in range(1 if label == BASELINE else spec.audit.trials)
    ]


def federate(spec: Spec, root: str | Path, *, watch: Watch | None = None) -> Run:
    """`fedsim run`: the rounds and their observations, no attack."""
    plan, run = _open(spec, root)
    watch = watch or Silent()
    _note_skipped(run, spec)
    if len(read_checkpoint(run)[0]) < spec.train.rounds:
        strategy = _strategy(plan, run, watch, on_observation=lambda round_, client: None)
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
                    pool.submit(job)

        try:
            for path in list_observations(run.observations):
                if is_finite(path):
                    attack(*address_of(path))
            strategy = _strategy(plan, run, watch, on_observation=attack)
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


def conclude(run: Run, *, seconds: float | None = None, watch: Watch | None = None) -> None:
    """Scores, summary and report from what the run directory holds."""
    from fedsim.report import write_report

    spec = run.spec
    jobs = jobs_of(run, spec, victims(spec))
    with (watch or Silent()).scoring():
        scores = score_jobs(run, jobs)
        run.write_table("scores", scores, parquet=True)
        labels = [label for label, _ in labelled_attacks(spec)]
        failed = failures(jobs)
        summary = {
            "name": spec.name,
            "spec_digest": spec.digest(),
            "threat": spec.threat.model,
            "oracle_labels": spec.threat.oracle_labels,
            "verdicts": summarise(scores, spec, labels, _ledgers(jobs), failed),
            "failed_jobs": failed,
            "events": run.events(),
            "unavailable": {
                "lpips": lpips_unavailable(),
                "identified": "identification needs a gallery of pictures, which this run has not",
            },
            "versions": versions(),
            "seconds": round(seconds, 1) if seconds is not None else _seconds_before(run),
        }
        write_json(run.root / "summary.json", summary)
        write_report(run, jobs)


def versions() -> dict[str, str]:
    names = ["fedsim", "torch", "timm", "flwr", "ray", "numpy", "scikit-image"]
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _open(spec: Spec, root: str | Path) -> tuple[Plan, Run]:
    if Path(root).exists():
        Run.create(root, spec)  # another spec's directory is refused before the slow checks
    plan = prepare(spec)
    return plan, Run.create(root, spec)


def _strategy(plan: Plan, run: Run, watch: Watch, *, on_observation: Any) -> AdversarialStrategy:
    return AdversarialStrategy(
        create_strategy(plan.spec),
        plan.spec,
        run,
        plan.public,
        on_observation=on_observation,
        on_round=watch.round_done,
        stop=threading.Event(),
    )


def _engine(spec: Spec) -> AbstractContextManager[None]:
    return ray_session(spec.engine) if spec.engine.kind == "ray" else nullcontext()


def _pool(spec: Spec, run: Run, watch: Watch) -> Pool:
    handout = Handout(spec.threat, spec.seed, spec.engine.device, load_surrogate(spec))
    kind = RayPool if spec.engine.kind == "ray" else InlinePool
    return kind(spec, handout, watch, secrets_of(spec, run))


def load_surrogate(spec: Spec) -> Tensor | None:
    """Images of the attacker's own, where the threat model grants them and the spec names them."""
    source = spec.threat.surrogate
    if source is None:
        return None
    data = DataSpec(name=source.name, path=source.path, image_size=spec.data.image_size)
    images = load_images(data, "train")
    return torch.stack([images.image(i) for i in range(min(len(images), SURROGATE_LIMIT))])


def _check_surrogate(spec: Spec) -> None:
    source = spec.threat.surrogate
    if source is None:
        return
    if "surrogate" not in granted_by(spec.threat):
        raise SpecError(f"threat {spec.threat.model} grants no surrogate data; threat D does.")
    if (source.name, source.path) == (spec.data.name, spec.data.path):
        raise SpecError("threat.surrogate is the clients' own data; give the attacker other data.")


def _check_prior(spec: Spec) -> None:
    if spec.threat.prior is None:
        return
    if "priors" not in granted_by(spec.threat):
        raise SpecError(f"threat {spec.threat.model} grants no prior network; threat D does.")
    load_prior(spec.threat.prior)


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
            run.note("pictures_skipped", f"{len(skipped)} damaged pictures were skipped: {names}")


def _ledgers(jobs: list[Job]) -> dict[str, list[str]]:
    """What each attack read, over all its jobs."""
    read: dict[str, list[str]] = {}
    for job in jobs:
        if job.result.is_file():
            own = read.setdefault(job.label, [])
            own += [field for field in Reconstruction.load(job.result).ledger if field not in own]
    return read


def _seconds_before(run: Run) -> float | None:
    path = run.root / "summary.json"
    return run.summary.get("seconds") if path.is_file() else None

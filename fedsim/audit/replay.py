"""Replay: an attack on observations that were captured earlier, without a federation."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from fedsim.audit.trust import announced_in, import_paths, refuse_strangers
from fedsim.campaign.granted_truth import refuse_other_runs
from fedsim.campaign.jobs import AnyJob, Handout, Job
from fedsim.campaign.plan import after_lessons, check_needs, jobs_on, lessons_on, rehearses
from fedsim.campaign.pools import InlinePool
from fedsim.campaign.progress import Silent, Watch
from fedsim.core.attack import Reconstruction
from fedsim.core.errors import FedsimError, ObservationError, SpecError
from fedsim.core.files import read_json
from fedsim.core.knowledge import THREATS, Secrets, granted_by
from fedsim.core.metrics import psnr
from fedsim.core.observation import chosen_in
from fedsim.core.run import Run, address_of, list_observations, paths
from fedsim.core.spec import Component, Spec, ThreatSpec, load_spec
from fedsim.scoring.scores import load_pictures


def attack_offline(
    source: Path,
    component: Component,
    output: Path | None,
    threat: str | None,
    trials: int,
    *,
    watch: Watch | None = None,
    trust: bool = False,
) -> list[dict[str, Any]]:
    """One row for each observation and trial; pictures and reconstructions go to ``output``.

    ``trust``: what the observations and the spec beside them name by import path may be imported.
    """
    watch = watch or Silent()
    files = _observations(source)
    run = Run(files[0].parents[2])
    spec = _spec(run, threat)
    observations = files[0].parents[1].absolute()
    named = announced_in(observations) | import_paths(spec.threat)
    refuse_strangers(observations, named, import_paths(component), trust=trust)
    _refuse_honest(files, spec.threat)
    check_needs(component, spec)
    results = (output or run.offline).absolute()
    label, learned = component.short_name, results / paths.LEARNED
    taught = files if rehearses(component) else list_observations(observations)
    rounds = sorted({address_of(path)[0] for path in taught})
    pool = InlinePool(
        spec,
        Handout(spec.threat, spec.seed, spec.engine.device),
        watch,
        partial(_without_truth, run, spec),
    )
    jobs = [
        after_lessons(job, learned, rounds)
        for job in jobs_on(
            observations, results, label, component, [address_of(path) for path in files], trials
        )
    ]
    memory, last = (jobs[-1].memory, jobs[-1].requires) if jobs else (None, None)
    if memory is not None:  # afresh, like the attacks: with this threat model, on this traffic
        shutil.rmtree(memory, ignore_errors=True)
        for lesson in lessons_on(observations, memory, label, component, rounds):
            pool.submit(lesson)
            if lesson.result == last:
                break
    for job in jobs:
        job.result.unlink(missing_ok=True)
        for page in job.notebook.parent.glob(f"{job.notebook.stem}*"):
            page.unlink()
        pool.submit(job)
    with watch.running(0, 0):
        pool.drain()
    granted = granted_by(spec.threat)
    return [_row(run, job, granted) for job in jobs]


def _observations(source: Path) -> list[Path]:
    if source.is_file():
        return [source.absolute().with_suffix(".json")]
    if not source.exists() and not source.with_suffix(".json").exists():
        raise ObservationError(f"there is no observation '{source}'.")
    if source.with_suffix(".json").is_file():
        return [source.absolute().with_suffix(".json")]
    files = sorted(source.absolute().glob("client-*.json")) or list_observations(source.absolute())
    files = files or list_observations(source.absolute() / paths.OBSERVATIONS)
    if not files:
        raise ObservationError(f"'{source}' holds no observation.")
    return files


def _spec(run: Run, threat: str | None) -> Spec:
    """The spec the observations were made with, or the defaults for files that travelled alone."""
    overrides = [f"threat={threat}"] if threat else []
    return load_spec(run.spec.model_dump(mode="json") if run.spec_path.is_file() else {}, overrides)


def _refuse_honest(files: list[Path], threat: ThreatSpec) -> None:
    """Raise for an active server's threat model where no observation has weights of its choice."""
    active = THREATS[threat.model]
    if active.deeds and not any(chosen_in(path) for path in files):
        raise SpecError(
            f"threat {active.letter} ({active.name}) changes the weights it sends, and nobody was "
            f"sent such in '{files[0].parent}'; C is the same server without that."
        )


def _without_truth(run: Run, spec: Spec, job: AnyJob) -> Secrets:
    """Nothing; observations in a run must be its own, those that travelled alone are anybody's."""
    if run.spec_path.is_file():
        refuse_other_runs(job, spec, run.classes)
    return Secrets()


def _row(run: Run, job: Job, granted: frozenset[str]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "observation": job.victim,
        "trial": job.trial,
        "psnr": None,
        "labels": None,
        "seconds": 0.0,
        "picture": None,
        "failure": None,
        "unscored": None,
    }
    if job.failure.is_file():
        return row | {"failure": read_json(job.failure)["reason"]}
    result = Reconstruction.load(job.result)
    picture = job.result.with_suffix(".png")
    if not len(result.images):  # the server's manoeuvre left none
        return row | {"seconds": result.seconds, "unscored": "; ".join(result.notes)}
    _draw(result.images, picture)
    try:
        pictures = load_pictures(run, job, granted)
    except FedsimError as error:  # as a rule no vault beside it: the attacker's own situation
        pictures = None
        row["unscored"] = str(error) if run.vault.is_dir() else "no vault"
    if pictures is not None:
        row["psnr"] = psnr(pictures.truth, pictures.guess).tolist()
    return row | {
        "labels": None if result.labels is None else result.labels.tolist(),
        "seconds": result.seconds,
        "picture": str(picture),
    }


def _draw(images: torch.Tensor, path: Path) -> None:
    side_by_side = torch.cat(list(images), dim=2)
    pixels = (side_by_side * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(path)

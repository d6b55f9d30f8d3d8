"""Scores: every reconstruction beside the truth, one row per true image."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fedsim.campaign.jobs import SPARED, Job, refuse_other_result, refuse_surplus, spared_by
from fedsim.campaign.seen import read_from
from fedsim.clients.data import pixel_digest
from fedsim.core.attack import Reconstruction
from fedsim.core.errors import DamagedError, FedsimError, RunError
from fedsim.core.files import read_json
from fedsim.core.knowledge import granted_by
from fedsim.core.metrics import (
    METRICS,
    Batch,
    Comparison,
    Metric,
    match_order,
    match_shifted,
    psnr,
    psnr_registered,
    ssim,
)
from fedsim.core.observation import (
    chosen_in,
    read_observation,
    recorded_checksum,
    recorded_pictures,
    refuse_foreign,
)
from fedsim.core.run import Run, address_of
from fedsim.core.vault import Truth, Vault
from fedsim.scoring.activations import features_beside
from fedsim.scoring.canary import check_canaries
from fedsim.scoring.identification import Gallery, Wanted
from fedsim.scoring.recovery import FLAT, FLAT_ORIGINAL, FLAT_SSIM, ORIGINAL, RECOVERED_DB
from fedsim.scoring.vigilance import refused_in

CLAIMED = "claimed"
FEATURES, FEATURES_FREE = "features", "features_free"
SSIM_ORIGINAL = "ssim_original"
_FAILURE = TypeAdapter(dict[str, str])
_REGISTERED = "psnr_registered"


def columns() -> list[str]:
    """The columns of the scores, in order."""
    return [
        *("round", "client", "attack", "threat", "trial", "image"),
        *METRICS,
        *("label_true", "label_recovered", "identified", "seconds", "loss", "canary", "picture"),
        *(ORIGINAL, SSIM_ORIGINAL, FLAT_ORIGINAL, FLAT, FLAT_SSIM, "digest", CLAIMED),
        *(FEATURES, FEATURES_FREE),
    ]


@dataclass(frozen=True)
class Pictures:
    """A reconstruction beside the truth, in the truth's order, for whoever draws them."""

    job: Job
    truth: Tensor
    labels: Tensor
    guess: Tensor
    result: Reconstruction  # as much of it as is scored
    recovered: list[int | None]  # the label that was recovered for each picture
    claimed: list[bool]  # whether the attack has a picture for it; if not, its guess is grey
    left_out: str | None = None  # what is not
    summed: bool = False  # whether it was read from the sum of a cohort
    shifted: Callable[[], Tensor | None] = lambda: None  # the guess in the order of `_elsewhere`
    before: Tensor | None = None  # the pictures as they were, where the model saw them augmented
    # The cosines of claimed features, and of a grey picture's, for each picture.
    features: Callable[[], tuple[list[float | None], list[float | None]] | None] = lambda: None

    @property
    def sources(self) -> Tensor:
        """The client's own pictures: those that somebody may be known by."""
        return self.truth if self.before is None else self.before


def score_jobs(run: Run, jobs: list[Job], gallery: Gallery | None = None) -> pd.DataFrame:
    """One row for each true image of each finished job, in the order of the jobs.

    Victim by victim, because the features of a true picture serve every attack on it.
    """
    chosen = {(job.round, job.client) for job in jobs}
    canaries = check_canaries(run, sorted(chosen - refused_in(run)))  # they uploaded nothing
    threat = run.spec.threat.model
    rows: dict[Job, list[dict[str, Any]]] = {}
    numbers: dict[str, int] = {}  # of the distinct pictures, as they are met
    by_victim = sorted(jobs, key=lambda job: (job.round, job.client))
    for _, jobs_on_victim in itertools.groupby(by_victim, key=lambda job: job.victim):
        yardstick: Yardstick | None = None
        for job in jobs_on_victim:
            where = {"round": job.round, "client": job.client}
            try:
                pictures = load_pictures(run, job)
            except FedsimError as error:  # damaged: costs this job, not the others
                run.note("not_scored", f"{job.name} is not scored: {error}", **where)
                continue
            if pictures is not None:
                if pictures.left_out is not None:
                    run.note("left_out", f"{job.name}: {pictures.left_out}", **where)
                # Whose picture is whose in a sum, the truth says; the null of identification
                # does not know that, so nobody is identified there.
                wanted = None if pictures.summed else gallery
                yardstick = yardstick or Yardstick.of(pictures.truth, wanted, pictures.sources)
                met = [numbers.setdefault(d, len(numbers)) for d in yardstick.digests]
                rows[job] = _rows(pictures, yardstick, threat, canaries.get(job.victim), met)
    return pd.DataFrame([row for job in jobs for row in rows.get(job, [])], columns=columns())


def results_of(jobs: Iterable[Job], seed: int) -> Iterator[tuple[Job, Reconstruction]]:
    """The finished jobs of a run of this ``seed`` with their results; one whose result is damaged,
    or another's, is not finished."""
    for job in jobs:
        if job.result.is_file():
            try:
                result = Reconstruction.load(job.result)
                refuse_other_result(result, job, seed)
            except RunError:
                continue
            yield job, result


def load_pictures(run: Run, job: Job, granted: frozenset[str] | None = None) -> Pictures | None:
    """What a finished job reconstructed, beside the truth; None for one that did not finish. What
    does not belong together is an error: result, observation and truth name each other."""
    if not job.result.is_file():
        return None
    refuse_foreign(job.observation, run.spec, run.classes)
    result = Reconstruction.load(job.result)
    refuse_other_result(result, job, run.spec.seed)
    known = granted_by(run.spec.threat) if granted is None else granted
    files = read_from(job.observation, known)
    truths = {address_of(file)[1]: _truth(run, file) for file in files}
    truth = truths[job.client]
    if not result.claims and chosen_in(job.observation) is None:
        raise RunError("it holds no picture.")
    if result.images.shape[1:] != truth.images.shape[1:]:
        raise RunError(f"its pictures are of another size, {tuple(result.images.shape[1:])}.")
    most = [recorded_pictures(file) or _samples(truths[address_of(file)[1]]) for file in files]
    refuse_surplus(result, sum(most))
    images = torch.cat([one.images for one in truths.values()])
    labels = torch.cat([one.labels for one in truths.values()])
    result, left_out = _as_many_as(result, len(images))
    blank = torch.full_like(truth.images[0], 0.5)  # an image the attack does not claim
    order = match_order(images, result.images)
    guess = torch.stack([result.images[row] if row >= 0 else blank for row in order])
    own = _own(truths, job.client)
    recovered, claimed = _align_labels(labels, result.labels)[own], [row >= 0 for row in order[own]]
    about = (result, recovered, claimed, left_out, len(truths) > 1)
    shifted = partial(_elsewhere, images, result.images, guess, own)
    before = truth.sources if truth.originals is not None else None
    features = partial(_features, job, truth, result.features, summed=len(truths) > 1)
    return Pictures(job, truth.images, truth.labels, guess[own], *about, shifted, before, features)


def _features(
    job: Job, truth: Truth, claimed: Tensor | None, *, summed: bool
) -> tuple[list[float | None], list[float | None]] | None:
    """The cosines of claimed features; of a sum, whose are whose nobody says."""
    if claimed is None or summed:
        return None
    return features_beside(read_observation(job.observation), truth, claimed)


def _elsewhere(images: Tensor, guesses: Tensor, placed: Tensor, own: slice) -> Tensor | None:
    """The guesses put in order once more, each pair compared where it fits best: pictures that came
    back shifted may all lie beside others' where they are compared in place. None where there is
    nothing to choose, or all came back in place."""
    if (
        not len(guesses)
        or len(images) == len(guesses) == 1
        or bool((psnr(images, placed) >= RECOVERED_DB).all())
    ):
        return None
    order = match_shifted(images, guesses)
    return torch.stack([guesses[r] if r >= 0 else placed[at] for at, r in enumerate(order)])[own]


def _truth(run: Run, path: Path) -> Truth:
    return Vault(run.vault).read(*address_of(path), recorded_checksum(path))


def _own(truths: Mapping[int, Truth], client: int) -> slice:
    """The rows of one client's pictures among those of its cohort."""
    before = list(itertools.takewhile(lambda other: other != client, truths))
    start = sum(len(truths[other].images) for other in before)
    return slice(start, start + len(truths[client].images))


def _as_many_as(result: Reconstruction, pictures: int) -> tuple[Reconstruction, str | None]:
    """No more guesses than there are true pictures, the attack's own first ones, and what was left
    out. What is public may allow for more, where a client says that it has more or takes some of
    its pictures twice; but among more guesses than pictures the truth would choose. A guess that
    an attack makes twice, to the last bit, is one guess: it takes no other's place."""
    whole = len(result.images)
    if whole > pictures:
        result = _without_copies(result)
    labels, copies = result.labels, whole - len(result.images)
    counts = {"pictures": len(result.images), "labels": 0 if labels is None else len(labels)}
    surplus = [f"{n - pictures} of {n} {what}" for what, n in counts.items() if n > pictures]
    if not surplus:
        return result, None
    twice = f", and {copies} of {whole} that are copies of others" if copies else ""
    kept = replace(
        result,
        images=result.images[:pictures],
        labels=None if labels is None else labels[:pictures],
    )
    behind = "1 picture stands" if pictures == 1 else f"{pictures} pictures stand"
    words = (
        f"{behind} behind the update; {' and '.join(surplus)} were left out, the last ones{twice}."
    )
    return kept, words


def _without_copies(result: Reconstruction) -> Reconstruction:
    """Each guess once, at its first place; with its label, where each has one."""
    first = {image.numpy().tobytes(): at for at, image in reversed([*enumerate(result.images)])}
    kept, labels = sorted(first.values()), result.labels
    if labels is not None and len(labels) == len(result.images):
        labels = labels[kept]
    return replace(result, images=result.images[kept], labels=labels)


def _samples(truth: Truth) -> int:
    """How many samples the client learned from, counted as often as it did."""
    return sum(map(len, truth.batches))


@dataclass(frozen=True)
class Yardstick:
    """What one victim's pictures are compared by, computed once for all attacks on them."""

    truth: Batch
    metrics: tuple[Metric, ...]  # those that can be computed for these pictures
    gallery: Gallery | None
    wanted: Wanted | None  # the pictures behind them, as the gallery sees them
    digests: tuple[str, ...]  # by which a picture is known again
    flat: tuple[float, ...]  # the PSNR of the best flat colour
    flat_original: tuple[float, ...]  # the same beside the pictures as they were
    flat_ssim: tuple[float, ...]

    @classmethod
    def of(cls, truth: Tensor, gallery: Gallery | None, sources: Tensor | None = None) -> Yardstick:
        """For pictures as the model saw them; who and what they are goes by their ``sources``."""
        pictures = Batch(truth)
        sources = truth if sources is None else sources
        return cls(
            pictures,
            tuple(m for m in METRICS.values() if m.missing(pictures.side) is None),
            gallery,
            gallery.wanted(sources) if gallery is not None else None,
            tuple(pixel_digest(picture) for picture in sources),
            tuple(psnr(truth, mean_colour(truth)).tolist()),
            tuple(psnr(sources, mean_colour(sources)).tolist()),
            tuple(ssim(truth, mean_colour(truth)).tolist()),
        )

    def measure(self, guess: Tensor, shifted: Tensor | None = None) -> dict[str, list[Any]]:
        """Every metric of every picture, a list per column. ``shifted`` are guesses in another
        order: one that is its picture there counts as registered. Below that mark it does not: the
        best of all orders and shifts is no fair mean."""
        compared = Comparison(self.truth, Batch(guess))
        measured: dict[str, list[Any]] = {
            name: [None] * len(guess) for name in (*METRICS, "identified")
        }
        measured |= {metric.name: metric.measure(compared).tolist() for metric in self.metrics}
        if shifted is not None:
            again = psnr_registered(self.truth.images, shifted).tolist()
            measured[_REGISTERED] = [
                max(found, value) if value >= RECOVERED_DB else found
                for found, value in zip(measured[_REGISTERED], again, strict=True)
            ]
        if self.gallery is not None and self.wanted is not None:
            measured["identified"] = self.gallery.identified(self.wanted, guess)
        return measured


def mean_colour(images: Tensor) -> Tensor:
    """Each picture as a flat one of its own mean colour: the closest that any flat one comes."""
    return images.double().mean((2, 3), keepdim=True).expand(images.shape)


def _rows(
    pictures: Pictures,
    yardstick: Yardstick,
    threat: str,
    canary: float | None,
    numbers: list[int],
) -> list[dict[str, Any]]:
    job, result, labels = pictures.job, pictures.result, pictures.labels
    recovered = pictures.recovered
    measured = yardstick.measure(pictures.guess, pictures.shifted())
    if pictures.before is None:
        original = (measured["psnr"], measured["ssim"])
    else:
        pair = (pictures.before, pictures.guess)
        original = (psnr(*pair).tolist(), ssim(*pair).tolist())
    nothing: list[float | None] = [None] * len(labels)
    features = pictures.features() or (nothing, nothing)
    return [
        {
            "round": job.round,
            "client": job.client,
            "attack": job.label,
            "threat": threat,
            "trial": job.trial,
            "image": image,
            **{name: values[image] for name, values in measured.items()},
            "label_true": int(labels[image]),
            "label_recovered": recovered[image],
            "seconds": round(result.seconds, 4),
            "loss": result.loss,
            "canary": canary,
            "picture": numbers[image],
            ORIGINAL: original[0][image],
            SSIM_ORIGINAL: original[1][image],
            FLAT_ORIGINAL: yardstick.flat_original[image],
            FLAT: yardstick.flat[image],
            FLAT_SSIM: yardstick.flat_ssim[image],
            "digest": yardstick.digests[image],
            CLAIMED: pictures.claimed[image],
            FEATURES: features[0][image],
            FEATURES_FREE: features[1][image],
        }
        for image in range(len(labels))
    ]


def _align_labels(truth: Tensor, recovered: Tensor | None) -> list[int | None]:
    """Labels are recovered as a multiset: each image gets its own where that is among them."""
    if recovered is None:
        return [None] * len(truth)
    left = [int(label) for label in recovered]
    aligned: list[int | None] = []
    for label in truth.tolist():
        aligned.append(label if label in left else None)
        if label in left:
            left.remove(label)
    return [left.pop(0) if label is None and left else label for label in aligned]


def failures(jobs: list[Job]) -> list[dict[str, str]]:
    """The jobs that could not be done, with their reasons."""
    return [entry for _, entry in _undone(jobs) if entry["kind"] != SPARED]


def spared(jobs: list[Job]) -> list[Job]:
    """The jobs that were needless, their victim being recovered before."""
    return [job for job, entry in _undone(jobs) if entry["kind"] == SPARED]


def _undone(jobs: list[Job]) -> Iterator[tuple[Job, dict[str, str]]]:
    for job in jobs:
        if job.failure.is_file() and not job.result.is_file():
            try:
                entry = _FAILURE.validate_python(read_json(job.failure))
                if entry["kind"] == SPARED and spared_by(job) is None:
                    why = "it was not needed, and the result that said so is gone"
                    entry |= {"kind": "fault", "reason": f"{why}; go on with `fedsim audit`"}
                yield job, entry
            except (DamagedError, ValidationError):
                why = f"it failed, and '{job.failure}', which says why, is damaged"
                about = {"job": job.name, "attack": job.label, "kind": "fault", "reason": why}
                yield job, about

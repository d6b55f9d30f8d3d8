"""Records: submissions that were scored, each a file under the run it is of.

A submission is compared with the truth by the code that compares everything else. What is kept of
that, and what its author is told, are the numbers that the board shows, rounded as it shows them:
no picture, no label, and no more digits, because with enough of them the score of chosen pictures
would tell the client's pixel by pixel.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from fedsim.board.names import checked_link, checked_name
from fedsim.board.submission import Submission, read_submission
from fedsim.campaign.jobs import Job
from fedsim.core.attack import Reconstruction
from fedsim.core.errors import DamagedError, RunError
from fedsim.core.files import read_json, write_json
from fedsim.core.metrics import METRICS
from fedsim.core.observation import recorded_checksum
from fedsim.core.run import Run, address_of, observation_name
from fedsim.core.spec import Component
from fedsim.report.headline import baseline_of
from fedsim.scoring.identification import identification_of
from fedsim.scoring.recovery import beside_baseline, recovered
from fedsim.scoring.scores import score_jobs

SHOWN = ("psnr", "ssim", "lpips")
_LABEL = "submission"


class Score(BaseModel):
    """What one true picture's closest submitted picture scores."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    round: int
    client: int
    image: int
    psnr: float
    ssim: float
    lpips: float | None = None
    identified: int | None = None
    recovered: bool


class Record(BaseModel):
    """One submission: whose it is, of what, and what it scored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    name: str
    link: str | None = None
    attack: str
    entered: str  # the day
    file: str  # a hash of the file
    spec: str
    observations: dict[str, str]
    pictures: list[Score]

    @property
    def table(self) -> pd.DataFrame:
        return pd.DataFrame([score.model_dump() for score in self.pictures])


def enter(run: Run, file: str | Path, name: str, link: str | None = None) -> Record:
    """`fedsim board submit`: score a file of reconstructions and keep what it scored."""
    checked_name(name)
    checked_link(link)
    if not run.is_concluded(run.spec):
        raise RunError(
            f"'{run.root}' is not concluded, so there is nothing to compare a submission with; "
            f"run `fedsim audit --resume {run.root}`."
        )
    submission = read_submission(Path(file), run)
    with run.locked():
        record = Record(
            name=name,
            link=link,
            attack=submission.attack,
            entered=datetime.now(UTC).date().isoformat(),
            file=submission.digest,
            spec=run.spec.digest(),
            observations=submission.checksums,
            pictures=_scores(run, submission),
        )
        write_json(run.submissions / _file_name(record), record.model_dump(mode="json"))
    return record


def read_records(run: Run) -> tuple[list[Record], list[str]]:
    """The submissions to a run, the oldest first, and why others are left out: they were edited, or
    are of updates that the run no longer has."""
    records, wrong = [], []
    for path in sorted(run.submissions.glob("*.json")):
        try:
            record = Record.model_validate(read_json(path))
            checked_name(record.name), checked_link(record.link)
            checked_name(record.attack, "the attack's name")
        except (DamagedError, ValidationError, RunError, OSError):
            wrong.append(f"the submission {path.name} is damaged and left out")
            continue
        if record.spec != run.spec.digest() or not _is_of(run, record):
            wrong.append(f"the submission {path.name} is of other updates and left out")
            continue
        records.append(record)
    return sorted(records, key=lambda record: record.entered), wrong


def _is_of(run: Run, record: Record) -> bool:
    """Whether the updates of a record are those of the run, and its scores are of them. What it
    calls them may be anything, and leads to observations alone."""
    for name, checksum in record.observations.items():
        if re.fullmatch(r"round-\d{4,}/client-\d{4,}", name) is None:
            return False
        if recorded_checksum(run.observations / f"{name}.json") != checksum:
            return False
    scored = {observation_name(score.round, score.client) for score in record.pictures}
    return bool(scored) and scored == record.observations.keys()


def _scores(run: Run, submission: Submission) -> list[Score]:
    """Every true picture of the attacked clients beside what was submitted, by the scoring of
    everything else: the assignment within a batch, and no more guesses than pictures."""
    summary, seed = run.summary, run.spec.seed
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for name in submission.checksums:
            round_, client = address_of(run.observations / f"{name}.json")
            component = Component(name=_LABEL)
            place = run.observations.absolute(), Path(folder)
            job = Job(*place, round_, client, component, _LABEL, 0)
            result = Reconstruction(submission.images[round_, client])
            result.observation, result.made_by = submission.checksums[name], job.digest(seed)
            result.save(job.result)
            jobs.append(job)
        rows = score_jobs(run, jobs, identification_of(run.spec).gallery)
    found = set(zip(rows["round"], rows["client"], strict=True))
    if missing := [job.victim for job in jobs if (job.round, job.client) not in found]:
        raise RunError(
            f"the submission could not be scored on {missing[0]}: see events.jsonl of '{run.root}'."
        )
    known = run.scores
    paired = beside_baseline(rows, known[known["attack"] == baseline_of(summary)])
    rows = rows.assign(recovered=recovered(paired).to_numpy())
    return [Score.model_validate(_rounded(row)) for row in rows.to_dict("records")]


def _rounded(row: dict[Any, Any]) -> dict[str, Any]:
    """The numbers of a picture as the board shows them."""
    place = {key: int(row[key]) for key in ("round", "client", "image")}
    numbers = {
        name: None if pd.isna(row[name]) else round(float(row[name]), METRICS[name].digits)
        for name in SHOWN
    }
    hit = row["identified"]
    identified = None if pd.isna(hit) else int(hit)
    return {**place, **numbers, "identified": identified, "recovered": bool(row["recovered"])}


def _file_name(record: Record) -> str:
    """Of its author's name what any disk takes, and of the file enough to tell two apart."""
    slug = re.sub(r"[^a-z0-9]+", "-", record.name.lower()).strip("-")[:40] or "somebody"
    return f"{slug}-{record.file[:12]}.json"


def best_known(records: Iterable[Record], envelope: pd.DataFrame) -> list[pd.DataFrame]:
    """For each submission the envelope with every picture at the better of the two: of pictures
    that nobody submitted, what the suite made counts."""
    keys = ["round", "client", "image"]
    tables = []
    for record in records:
        both = envelope.merge(record.table, on=keys, how="left", suffixes=("", "_submitted"))
        better = (both["psnr_submitted"] > both["psnr"]).to_numpy()
        lowered = envelope.copy()
        for name in (*SHOWN, "identified"):
            lowered[name] = both[name].where(~better, both[f"{name}_submitted"]).to_numpy()
        hit = both["recovered_submitted"].map(lambda value: value is True)
        lowered["recovered"] = (both["recovered"].astype(bool) | hit).to_numpy()
        tables.append(lowered)
    return tables

"""TensorBoard events, for people who look there: rounds, losses of attacks, leakage, pictures.

A `Watch` around another one: it writes what it is told to ``DIR/tensorboard``, and passes it on.
Needs the package ``tensorboard`` (``pip install fedsim[tensorboard]``).
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fedsim.campaign.jobs import AnyJob
from fedsim.campaign.plan import jobs_of, victims
from fedsim.campaign.progress import Watch
from fedsim.core.errors import FedsimError
from fedsim.core.metrics import shown_in
from fedsim.core.run import Run
from fedsim.scoring.scores import load_pictures

PICTURES = 8  # per attack


class Events:
    """Writes events, and tells ``inner`` the same."""

    def __init__(self, inner: Watch, root: str | Path):
        if find_spec("tensorboard") is None:
            raise FedsimError(
                "TensorBoard events need the package tensorboard: pip install fedsim[tensorboard]."
            )
        self.inner, self.folder = inner, Path(root) / "tensorboard"

    @functools.cached_property
    def writer(self) -> Any:
        """Made at the first event: a run wants its directory empty when it begins."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder))

    def running(self, rounds: int, done: int) -> AbstractContextManager[None]:
        return self.inner.running(rounds, done)

    def scoring(self) -> AbstractContextManager[None]:
        return self.inner.scoring()

    def round_done(self, row: dict[str, Any]) -> None:
        for name in ("train_loss", "test_loss", "test_accuracy", "bytes", "seconds"):
            if row.get(name) is not None:
                self.writer.add_scalar(f"rounds/{name}", float(row[name]), int(row["round"]))
        self.inner.round_done(row)

    def queued(self, job: AnyJob) -> None:
        self.inner.queued(job)

    def progressed(self, job: AnyJob, done: int, total: int, loss: float | None) -> None:
        if loss is not None:
            self.writer.add_scalar(f"attacks/{job.name}", loss, done)
        self.inner.progressed(job, done, total, loss)

    def finished(self, job: AnyJob, failure: str | None) -> None:
        self.inner.finished(job, failure)

    def conclude(self, run: Run) -> None:
        """Leakage by round and attack, and pictures beside their reconstructions."""
        scores = run.scores
        for (attack, round_), rows in scores.groupby(["attack", "round"]):
            for name in (metric.name for metric in shown_in("tensorboard")):
                if rows[name].notna().any():
                    value = float(rows[name].astype(float).mean())
                    self.writer.add_scalar(f"leakage/{name}/{attack}", value, int(str(round_)))
        shown: dict[str, list[torch.Tensor]] = {}
        for job in jobs_of(run, run.spec, victims(run.spec)):
            try:
                pictures = load_pictures(run, job)
            except FedsimError:  # the scores tell
                continue
            chosen = shown.setdefault(job.label, [])
            if pictures is not None and len(chosen) < PICTURES:
                pairs = torch.cat([pictures.truth, pictures.guess], dim=3)
                chosen += list(pairs)[: PICTURES - len(chosen)]
        for label, pairs_of in shown.items():
            if pairs_of:
                self.writer.add_images(f"pictures/{label}", torch.stack(pairs_of), 0)
        self.writer.close()

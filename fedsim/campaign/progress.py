"""Progress of a run: bars for people, silence for scripts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedsim.campaign.jobs import AnyJob
from fedsim.core.attack import Progress as Report
from fedsim.core.console import column, styled

OnCell = Callable[[int, int, str], None]  # cells done, cells in all, the one at hand


class Watch(Protocol):
    """What an audit tells while it runs."""

    def running(self, rounds: int, done: int) -> AbstractContextManager[None]: ...
    def scoring(self) -> AbstractContextManager[None]: ...
    def round_done(self, row: dict[str, Any]) -> None: ...
    def queued(self, job: AnyJob) -> None: ...
    def progressed(self, job: AnyJob, done: int, total: int, loss: float | None) -> None: ...
    def finished(self, job: AnyJob, failure: str | None) -> None: ...


class Silent:
    """Says nothing."""

    def running(self, rounds: int, done: int) -> AbstractContextManager[None]:
        return nullcontext()

    def scoring(self) -> AbstractContextManager[None]:
        return nullcontext()

    def cells(self) -> AbstractContextManager[OnCell]:
        return nullcontext(lambda done, total, cell: None)

    def round_done(self, row: dict[str, Any]) -> None: ...
    def queued(self, job: AnyJob) -> None: ...
    def progressed(self, job: AnyJob, done: int, total: int, loss: float | None) -> None: ...
    def finished(self, job: AnyJob, failure: str | None) -> None: ...


class Bars:
    """Rounds and attacks as bars with the loss and the time left, failures as lines."""

    def __init__(self, console: Console):
        self.console = console
        self.progress = Progress(
            column("{task.description:<8}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            column("left"),
            TimeRemainingColumn(),
            column("{task.fields[note]}", "dim"),
            console=console,
        )
        self._lock = threading.Lock()
        self._rounds: TaskID | None = None
        self._attacks: TaskID | None = None
        self._fractions: dict[AnyJob, float] = {}
        self._done = 0

    @contextmanager
    def running(self, rounds: int, done: int) -> Iterator[None]:
        if rounds:
            note = "starting the clients" if done < rounds else "done before"
            self._rounds = self.progress.add_task("rounds", total=rounds, completed=done, note=note)
        with self.progress:
            yield

    @contextmanager
    def single(self, words: str) -> Iterator[Report]:
        """One bar for one long piece of work, moved by what is yielded."""
        with self.progress:
            task = self.progress.add_task(words, total=None, note="")

            def report(done: int, total: int, loss: float | None = None) -> None:
                note = "" if loss is None else f"loss {loss:.4g}"
                self.progress.update(task, completed=done, total=total, note=note)

            yield report

    @contextmanager
    def cells(self) -> Iterator[OnCell]:
        """A bar over the cells of a benchmark."""
        with self.progress:
            task = self.progress.add_task("cells", total=None, note="")

            def report(done: int, total: int, cell: str) -> None:
                self.progress.update(task, completed=done, total=total, note=cell)

            yield report

    @contextmanager
    def scoring(self) -> Iterator[None]:
        with self.console.status("scoring and writing the report"):
            yield

    def round_done(self, row: dict[str, Any]) -> None:
        if self._rounds is None:
            return
        parts = []
        if row.get("train_loss") is not None:
            parts.append(f"loss {row['train_loss']:.3f}")
        if row.get("test_accuracy") is not None:
            parts.append(f"test accuracy {row['test_accuracy']:.1%}")
        self.progress.update(self._rounds, advance=1, note=", ".join(parts))

    def queued(self, job: AnyJob) -> None:
        with self._lock:
            if self._attacks is None:
                self._attacks = self.progress.add_task("attacks", total=0, note="waiting")
            total = self.progress.tasks[self.progress.task_ids.index(self._attacks)].total or 0
            self.progress.update(self._attacks, total=total + 1)

    def progressed(self, job: AnyJob, done: int, total: int, loss: float | None) -> None:
        self._fractions[job] = min(1.0, done / total) if total else 0.0
        note = f"{job.label} {done}/{total}" + (f", loss {loss:.4g}" if loss is not None else "")
        self._move(note)

    def finished(self, job: AnyJob, failure: str | None) -> None:
        self._fractions.pop(job, None)
        self._done += 1
        self._move(job.label)
        if failure:
            words = styled((f"{job.name} failed:", "yellow"), f" {failure}")
            self.progress.console.print(words)

    def _move(self, note: str) -> None:
        with self._lock:
            if self._attacks is not None:
                completed = self._done + sum(self._fractions.values())
                self.progress.update(self._attacks, completed=completed, note=note)

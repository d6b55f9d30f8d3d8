"""Watching a campaign: bars that move with the jobs, failures as lines, or silence."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fedsim.campaign.jobs import Job
from fedsim.campaign.progress import Bars, Silent
from fedsim.core.spec import Component


def job(client: int) -> Job:
    return Job(Path("o"), Path("r"), 1, client, Component(name="dlg"), "dlg", 0)


def test_the_bar_of_attacks_is_as_far_as_its_jobs() -> None:
    bars = Bars(Console(file=io.StringIO()))
    for client in (0, 1):
        bars.queued(job(client))
    bars.progressed(job(0), 5, 10, 0.25)
    (task,) = bars.progress.tasks
    assert (task.description, task.total, task.completed) == ("attacks", 2, 0.5)
    assert task.fields["note"] == "dlg 5/10, loss 0.25"
    bars.finished(job(0), None)
    assert task.completed == 1


def test_the_bar_of_rounds_tells_loss_and_accuracy() -> None:
    bars = Bars(Console(file=io.StringIO()))
    with bars.running(3, 1):
        bars.round_done({"train_loss": 1.23456, "test_accuracy": 0.5})
        (task,) = bars.progress.tasks
        assert (task.completed, task.total) == (2, 3)
        assert task.fields["note"] == "loss 1.235, test accuracy 50.0%"


def test_a_failure_is_a_line_with_its_reason() -> None:
    told = io.StringIO()
    bars = Bars(Console(file=told, width=200))
    bars.queued(job(0))
    bars.finished(job(0), "no memory")
    assert f"{job(0).name} failed: no memory" in told.getvalue()


def test_a_single_piece_of_work_moves_one_bar() -> None:
    bars = Bars(Console(file=io.StringIO()))
    with bars.single("training") as report:
        report(3, 12, 0.5)
        (task,) = bars.progress.tasks
        assert (task.description, task.completed, task.total) == ("training", 3, 12)
    with bars.cells() as on_cell:
        on_cell(1, 4, "clipping")
        assert bars.progress.tasks[-1].fields["note"] == "clipping"


def test_silence_takes_all_it_is_told_and_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    silent = Silent()
    with silent.running(2, 0), silent.scoring(), silent.cells() as on_cell:
        on_cell(1, 2, "cell")
        silent.round_done({"round": 1})
        silent.queued(job(0))
        silent.progressed(job(0), 1, 2, None)
        silent.finished(job(0), "a reason")
    assert capsys.readouterr() == ("", "")

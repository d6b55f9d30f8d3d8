"""A run without truth says what was made, and no more."""

from __future__ import annotations

from pathlib import Path

import fedsim
from fedsim.campaign.plan import jobs_of, victims
from fedsim.scoring.unscored import unscored, witnessed
from tests import flower_task as task
from tests.flower_app import App, captured, entry


def test_what_was_made_is_counted_and_not_judged(tmp_path: Path) -> None:
    app = App(model=task.Plain, examples=2, batch_size=2)
    app.run(captured(app, tmp_path / "mine", batch_size=2), 1)
    attacks = [{"name": "inverting_gradients", "steps": 5}]
    run = fedsim.audit(tmp_path / "mine", attacks=attacks)
    jobs = jobs_of(run, run.spec, victims(run.spec))
    assert not any(witnessed(run, job) for job in jobs)
    made = unscored(run, jobs)["inverting_gradients"]
    assert (made["made"], made["victims"], made["labels_read"]) == (4, 2, 4)
    assert made["loss"] > 0
    words = entry(run, "inverting_gradients")["words"]
    assert "made 4 pictures from 2 of 2 updates" in words
    assert "may be right or wrong" in words

"""Attacks that nobody named fit the model, and those that were named stay."""

from __future__ import annotations

from pathlib import Path

from tests import flower_task as task
from tests.flower_app import App, captured, settled


def test_attacks_that_nobody_named_fit_the_model(tmp_path: Path) -> None:
    app = App(model=task.Plain)
    app.run(captured(app, tmp_path / "mine"), 1)
    run = settled(tmp_path / "mine")
    assert [attack.name for attack in run.spec.attacks] == ["inverting_gradients"]
    run = settled(tmp_path / "mine", "attacks=[{name: dlg, steps: 7}]")
    assert [attack.name for attack in run.spec.attacks] == ["dlg"]
    assert [a.name for a in settled(tmp_path / "mine").spec.attacks] == ["dlg"]  # as before

"""What is said of an app, and what of it cannot be."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest

from fedsim.captures.log import read_head
from fedsim.captures.trouble import CaptureWarning
from tests import flower_task as task
from tests.flower_app import App, captured, settled, updates


def test_warnings_made_errors_do_not_reach_the_training(tmp_path: Path) -> None:
    app = App(model=task.Plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        app.run(captured(app, tmp_path / "mine", lr="much", speed=3), 1)
    assert read_head(tmp_path / "mine").train.keys() == {"batch_size", "local_epochs", "optimizer"}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (task.Net, "Net"),
        (task.Net(), "Net"),
        (functools.partial(task.Plain, width=8), "Plain"),
        ("tests.flower_task:Plain", "Plain"),
    ],
)
def test_a_model_is_named_by_its_import_path(model: Any, name: str, tmp_path: Path) -> None:
    app = App(model=task.Plain if name == "Plain" else task.Net)
    app.run(captured(app, tmp_path / "mine", model=model), 1)
    head = read_head(tmp_path / "mine")
    assert head.model["name"] == f"tests.flower_task:{name}"
    assert head.app == str(Path(__file__).parents[2])


def test_a_model_made_in_a_function_is_told_and_captured(tmp_path: Path) -> None:
    class Own(task.Plain):
        pass

    app = App(model=task.Plain)
    with pytest.warns(CaptureWarning, match="made inside a function, which the audit cannot"):
        app.run(captured(app, tmp_path / "mine", model=Own), 1)
    assert len(updates(settled(tmp_path / "mine", "model={name: 'tests.flower_task:Plain'}"))) == 2

"""A capture becomes a run, once all is known that its observations announce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict

from fedsim.captures.trouble import CaptureWarning
from fedsim.core.errors import RunError, SpecError
from tests import flower_task as task
from tests.flower_app import App, captured, settled


def test_a_mistake_in_a_declaration_is_told_and_can_be_said_again(tmp_path: Path) -> None:
    app = App(model=task.Plain)
    with pytest.warns(CaptureWarning, match="there is no 'learning_rate' to declare"):
        app.run(captured(app, tmp_path / "mine", lr=None, learning_rate=0.1), 1)
    with pytest.raises(SpecError, match=r"declare train\.lr=\.\.\."):
        settled(tmp_path / "mine")
    assert settled(tmp_path / "mine", "train.lr=0.1").spec.train.lr == 0.1
    assert settled(tmp_path / "mine").spec.train.lr == 0.1  # remembered


def test_what_the_app_sends_to_its_clients_is_not_asked_for(tmp_path: Path) -> None:
    app = App(model=task.Plain)
    strategy = captured(app, tmp_path / "mine", lr=None, local_epochs=None)
    app.run(strategy, 2, train_config=ConfigRecord({"learning-rate": 0.1, "local_epochs": 1}))
    run = settled(tmp_path / "mine")
    assert (run.spec.train.lr, run.spec.train.local_epochs) == (0.1, 1)
    words = [event["message"] for event in run.events() if event["kind"] == "inferred"]
    assert "train.lr is 0.1, as the messages to the clients say" in words


def test_one_example_is_a_batch_of_one(tmp_path: Path) -> None:
    app = App(model=task.Plain, examples=1, batch_size=1)
    app.run(captured(app, tmp_path / "mine", batch_size=None), 1)
    assert settled(tmp_path / "mine").spec.train.batch_size == 1


def test_a_full_batch_is_told_by_the_rank_of_the_output_layer(tmp_path: Path) -> None:
    app = App(model=task.Plain, examples=4, batch_size=4)
    one_step = {"local_epochs": None, "local_steps": 1}
    app.run(captured(app, tmp_path / "mine", batch_size=None, **one_step), 1)
    assert settled(tmp_path / "mine").spec.train.batch_size == 4


def test_the_batches_of_an_epoch_are_not_guessed(tmp_path: Path) -> None:
    app = App(model=task.Plain, examples=4, batch_size=2)
    app.run(captured(app, tmp_path / "mine", batch_size=None), 1)
    with pytest.raises(SpecError, match=r"declare train\.batch_size=\.\.\."):
        settled(tmp_path / "mine")


def test_a_capture_without_an_answer_says_why(tmp_path: Path) -> None:
    def reply(client: int, round_: int, weights: Any, content: RecordDict) -> RecordDict:
        raise ValueError("broken everywhere")

    app = App(model=task.Plain, reply=reply)
    app.run(captured(app, tmp_path / "mine"), 1)
    with pytest.raises(RunError, match="broken everywhere"):
        settled(tmp_path / "mine")

"""A capture becomes a run, once all is known that its observations announce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedsim.captures.trouble import CaptureWarning
from fedsim.core.errors import ModelError, RunError, SpecError
from tests import flower_task as task
from tests.flower_app import App, bytes_of, captured, settled, updates


def as_list(state: dict[str, Any]) -> ArrayRecord:
    return ArrayRecord.from_numpy_ndarrays([np.asarray(tensor) for tensor in state.values()])


def load_list(model: Any, record: ArrayRecord) -> None:
    values = [torch.tensor(array) for array in record.to_numpy_ndarrays()]
    model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))


def test_arrays_without_names_get_those_of_the_model(tmp_path: Path) -> None:
    app = App(arrays=as_list, load=load_list)
    plain = app.run(app.strategy(), 2)
    assert bytes_of(app.run(captured(app, tmp_path / "mine"), 2)) == bytes_of(plain)
    for _ in range(2):  # again, when the names are there already
        run = settled(tmp_path / "mine")
        seen = updates(run)
        assert set(seen[0].update.tensors) == {name for name, _ in task.Net().named_parameters()}
        assert "bn.running_mean" in seen[0].update.buffers
        assert len(seen) == 4
    named = App()
    named.run(captured(named, tmp_path / "named"), 2)
    others = updates(settled(tmp_path / "named"))
    for one, other in zip(seen[:2], others[:2], strict=True):  # later sums are of another order
        for name, tensor in other.update.tensors.items():
            assert torch.equal(one.update.tensors[name], tensor)
        for name, tensor in other.update.buffers.items():
            torch.testing.assert_close(one.update.buffers[name], tensor)


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
    app.run(captured(app, tmp_path / "mine", batch_size=None), 1)
    assert settled(tmp_path / "mine").spec.train.batch_size == 4


def test_another_model_than_the_one_trained_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    app = App(model=task.Plain)
    app.run(captured(app, tmp_path / "mine", model=task.Net), 1)
    with pytest.raises(ModelError, match="trains another model than the one declared"):
        settled(tmp_path / "mine")


def test_a_capture_without_an_answer_says_why(tmp_path: Path) -> None:
    def reply(client: int, round_: int, weights: Any, content: RecordDict) -> RecordDict:
        raise ValueError("broken everywhere")

    app = App(model=task.Plain, reply=reply)
    app.run(captured(app, tmp_path / "mine"), 1)
    with pytest.raises(RunError, match="broken everywhere"):
        settled(tmp_path / "mine")


def test_attacks_that_nobody_named_fit_the_model(tmp_path: Path) -> None:
    app = App(model=task.Plain)
    app.run(captured(app, tmp_path / "mine"), 1)
    run = settled(tmp_path / "mine")
    assert [attack.name for attack in run.spec.attacks] == ["inverting_gradients"]
    run = settled(tmp_path / "mine", "attacks=[{name: dlg, steps: 7}]")
    assert [attack.name for attack in run.spec.attacks] == ["dlg"]
    assert [a.name for a in settled(tmp_path / "mine").spec.attacks] == ["dlg"]  # as before

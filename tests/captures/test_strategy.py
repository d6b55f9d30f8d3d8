"""A captured app: the same to the last byte, and an observation of every reply."""

from __future__ import annotations

import copy
import errno
import functools
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
)

import fedsim
from fedsim.captures import session
from fedsim.captures.log import captured_elsewhere, read_head, read_messages
from fedsim.captures.settling import Wanted, settle
from fedsim.captures.strategy import CapturedStrategy
from fedsim.captures.trouble import CaptureWarning
from fedsim.core.errors import ModelError, RunError, SpecError
from fedsim.core.observation import read_observation
from fedsim.core.run import Run, list_observations
from tests.captures import task
from tests.captures.conftest import App, bytes_of, captured


def settled(root: Path, *overrides: str) -> Run:
    run = Run(root)
    settle(run, Wanted.of(None, overrides))
    return run


def updates(run: Run) -> list[Any]:
    return [read_observation(path) for path in list_observations(run.observations)]


def kinds(run: Run) -> set[str]:
    return {event["kind"] for event in run.events()}


@pytest.mark.parametrize("kind", [FedAvg, FedAdam, FedMedian])
def test_a_captured_app_ends_with_the_same_bytes(tmp_path: Path, kind: Any) -> None:
    app = App(model=task.Plain)
    plain = app.run(app.strategy(kind), 3)
    seen = app.run(captured(app, tmp_path / "mine", app.strategy(kind)), 3)
    assert bytes_of(seen) == bytes_of(plain)
    assert seen.train_metrics_clientapp == plain.train_metrics_clientapp
    assert len(list((tmp_path / "mine/observations").glob("round-*/client-*"))) == 6


def test_every_reply_becomes_an_observation_of_what_changed(tmp_path: Path) -> None:
    app = App()
    app.run(captured(app, tmp_path / "mine"), 2)
    run = settled(tmp_path / "mine")
    seen = updates(run)
    assert [(o.round, o.client) for o in seen] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    torch.manual_seed(0)
    initial = task.Net()
    assert torch.equal(seen[0].weights["fc.weight"], initial.fc.weight)
    assert set(seen[0].update.tensors) == {name for name, _ in initial.named_parameters()}
    assert set(seen[0].update.buffers) == {n for n, _ in initial.named_buffers()}
    assert seen[0].update.num_examples == 6
    assert list(run.rounds["clients"]) == [2, 2]


def test_keys_metrics_and_config_of_the_app_are_its_own(tmp_path: Path) -> None:
    app = App(model=task.Plain, keys=("weights-of-ours", "settings"))
    config = ConfigRecord({"anything": 1})
    seen: list[int] = []

    def central(round_: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(round_)
        return MetricRecord({"accuracy": 0.5})

    strategy = captured(app, tmp_path / "mine")
    result = app.run(strategy, 2, train_config=config, evaluate_fn=central)
    assert seen == [0, 1, 2]
    assert result.evaluate_metrics_serverapp[2]["accuracy"] == 0.5
    rounds, _ = read_messages(tmp_path / "mine")
    assert rounds[1].config == {"anything": 1, "server-round": 2}
    assert len(updates(settled(tmp_path / "mine"))) == 4


class Counting(FedAvg):
    """A strategy with a start and a state of its own."""

    def start(self, *args: Any, **kwargs: Any) -> Any:
        self.started = getattr(self, "started", 0) + 1
        return super().start(*args, **kwargs)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        self.last = server_round
        return super().aggregate_train(server_round, replies)


def test_a_strategy_keeps_its_start_its_state_and_its_attributes(tmp_path: Path) -> None:
    app = App(model=task.Plain)
    strategy: Any = captured(app, tmp_path / "mine", app.strategy(Counting))
    app.run(strategy, 2)
    assert (strategy.started, strategy.last, strategy.fraction_train) == (1, 2, 1.0)
    strategy.fraction_train = 0.5
    assert strategy._inner.fraction_train == 0.5
    assert copy.copy(strategy).last == 2
    with pytest.raises(AttributeError):
        _ = strategy.nothing_of_this_name


def test_a_wrapper_around_a_captured_strategy_is_captured_too(tmp_path: Path) -> None:
    app = App(model=task.Plain)

    def noisy(inner: Any) -> Any:
        return DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 1000.0, app.clients)

    plain = app.run(noisy(app.strategy()), 2)
    inner = captured(app, tmp_path / "mine")
    seen = app.run(noisy(inner), 2)
    assert bytes_of(seen) == bytes_of(plain)
    vars(inner)["_session"].end()
    assert len(updates(settled(tmp_path / "mine"))) == 4


def test_a_client_that_raises_is_an_event(tmp_path: Path) -> None:
    def reply(client: int, round_: int, weights: Any, content: RecordDict) -> RecordDict:
        if client == 1 and round_ == 1:
            raise RuntimeError("no data here")
        return content

    app = App(model=task.Plain, reply=reply)
    plain = app.run(app.strategy(), 2)
    assert bytes_of(app.run(captured(app, tmp_path / "mine"), 2)) == bytes_of(plain)
    run = settled(tmp_path / "mine")
    assert len(updates(run)) == 3
    failed = [event for event in run.events() if event["kind"] == "client_failed"]
    assert "no data here" in failed[0]["message"]


def test_a_reply_without_metrics_is_kept_and_told(tmp_path: Path) -> None:
    def reply(client: int, round_: int, weights: Any, content: RecordDict) -> RecordDict:
        return RecordDict({"arrays": content["arrays"]})

    class Unweighted(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return [*replies][-1].content["arrays"], None

    app = App(model=task.Plain, reply=reply)
    app.run(captured(app, tmp_path / "mine", app.strategy(Unweighted)), 1)
    run = settled(tmp_path / "mine")
    assert len(updates(run)) == 2
    assert "no_examples" in kinds(run)


def test_a_reply_of_the_head_alone_is_a_part(tmp_path: Path) -> None:
    def reply(client: int, round_: int, weights: Any, content: RecordDict) -> RecordDict:
        arrays = {n: a for n, a in content["arrays"].items() if n.startswith("fc.")}
        return RecordDict({"arrays": ArrayRecord(arrays), "metrics": content["metrics"]})

    class Heads(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return (None, None) if list(replies) else None

    app = App(model=task.Plain, reply=reply)
    app.run(captured(app, tmp_path / "mine", app.strategy(Heads)), 1)
    run = settled(tmp_path / "mine")
    for seen in updates(run):
        assert set(seen.update.tensors) == {"fc.weight", "fc.bias"}
    assert "part_trained" in kinds(run)


def test_a_reply_of_another_shape_is_left_out(tmp_path: Path) -> None:
    def reply(client: int, round_: int, weights: Any, content: RecordDict) -> RecordDict:
        if client == 0:
            content["arrays"] = ArrayRecord(task.Plain(4).state_dict())
        return content

    class First(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            own = [r for r in replies if r.content["arrays"]["fc.bias"].shape == (10,)]
            return own[-1].content["arrays"], None

    app = App(model=task.Plain, reply=reply)
    app.run(captured(app, tmp_path / "mine", app.strategy(First)), 1)
    run = settled(tmp_path / "mine")
    assert len(updates(run)) == 1
    rejected = [event for event in run.events() if event["kind"] == "update_rejected"]
    assert "'conv.weight' is of shape (4, 3, 3, 3)" in rejected[0]["message"]


def test_a_model_that_changes_shape_is_kept_as_long_as_it_was_one(tmp_path: Path) -> None:
    class Growing(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            width = 8 if server_round < 2 else 12
            arrays = ArrayRecord(task.Plain(width).state_dict())
            return super().configure_train(server_round, arrays, config, grid)

    def load(model: Any, record: ArrayRecord) -> None:
        state = record.to_torch_state_dict()
        model.__init__(len(state["conv.weight"]))
        model.load_state_dict(state)

    app = App(model=task.Plain, load=load)
    app.run(captured(app, tmp_path / "mine", app.strategy(Growing)), 2)
    run = settled(tmp_path / "mine")
    assert {seen.round for seen in updates(run)} == {1}
    assert "shape_changed" in kinds(run)


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


def test_a_full_disk_is_a_warning_and_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App(model=task.Plain)
    plain = app.run(app.strategy(), 2)
    kept = session.save_tensors

    def full(path: Path, *rest: Any) -> None:
        if "client-0001" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        kept(path, *rest)

    monkeypatch.setattr(session, "save_tensors", full)
    with pytest.warns(CaptureWarning, match="No space left on device"):
        seen = app.run(captured(app, tmp_path / "mine"), 2)
    assert bytes_of(seen) == bytes_of(plain)
    monkeypatch.undo()
    run = settled_here(tmp_path / "mine")
    assert [o.client for o in updates(run)] == [0, 0]
    assert "capture_failed" in kinds(run)


def settled_here(root: Path) -> Run:
    import sys

    sys.modules["task"] = task
    return settled(root, "model.name=task:Plain")


def test_a_folder_that_cannot_be_made_costs_the_capture_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    app = App(model=task.Plain)
    plain = app.run(app.strategy(), 1)
    with pytest.warns(CaptureWarning, match="the capture cannot begin"):
        seen = app.run(captured(app, tmp_path / "file" / "mine"), 1)
    assert bytes_of(seen) == bytes_of(plain)


def test_a_second_run_goes_into_a_directory_of_its_own(tmp_path: Path) -> None:
    app = App(model=task.Plain)
    app.run(captured(app, tmp_path / "mine"), 1)
    before = sorted(path.name for path in (tmp_path / "mine").rglob("*"))
    with pytest.warns(CaptureWarning, match="captured in '.*mine-2'"):
        app.run(captured(app, tmp_path / "mine"), 1)
    assert sorted(path.name for path in (tmp_path / "mine").rglob("*")) == before
    assert len(updates(settled(tmp_path / "mine-2"))) == 2
    assert captured_elsewhere("mine-2") == tmp_path / "mine-2"


def test_warnings_made_errors_do_not_reach_the_training(tmp_path: Path) -> None:
    app = App(model=task.Plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        app.run(captured(app, tmp_path / "mine", lr="much", speed=3), 1)
    assert read_head(tmp_path / "mine").train.keys() == {"batch_size", "local_epochs", "optimizer"}


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


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (task.Net, "task:Net"),
        (task.Net(), "task:Net"),
        (functools.partial(task.Plain, width=8), "task:Plain"),
        ("task:Plain", "task:Plain"),
    ],
)
def test_a_model_is_named_by_its_import_path(model: Any, name: str, tmp_path: Path) -> None:
    app = App(model=task.Plain if "Plain" in name else task.Net)
    app.run(captured(app, tmp_path / "mine", model=model), 1)
    found = read_head(tmp_path / "mine").model["name"]
    assert found.rpartition(".")[2] == name.replace("task:", "task:") or found.endswith(name)


def test_a_model_made_in_a_function_is_told_and_captured(tmp_path: Path) -> None:
    class Own(task.Plain):
        pass

    app = App(model=task.Plain)
    with pytest.warns(CaptureWarning, match="made inside a function, which the audit cannot"):
        app.run(captured(app, tmp_path / "mine", model=Own), 1)
    assert len(updates(settled(tmp_path / "mine", "model={name: 'task:Plain'}"))) == 2


def test_another_model_than_the_one_trained_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    app = App(model=task.Plain)
    app.run(captured(app, tmp_path / "mine", model=task.Net), 1)
    with pytest.raises(ModelError, match="trains another model than the one declared"):
        settled(tmp_path / "mine")


def test_a_client_that_was_sent_other_weights_is_attacked_on_those(tmp_path: Path) -> None:
    class Personal(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            messages = list(super().configure_train(server_round, arrays, config, grid))
            state = arrays.to_torch_state_dict()
            state["fc.bias"] = state["fc.bias"] + 1
            own = RecordDict({"arrays": ArrayRecord(state), "config": config})
            messages[-1].content = own
            self.changed = messages[-1].metadata.dst_node_id
            return messages

    app = App(model=task.Plain)
    app.run(captured(app, tmp_path / "mine", app.strategy(Personal)), 1)
    run = settled(tmp_path / "mine")
    one, other = updates(run)
    apart = other.weights["fc.bias"] - one.weights["fc.bias"]
    torch.testing.assert_close(apart.abs(), torch.ones(task.CLASSES))
    assert torch.equal(other.weights["fc.weight"], one.weights["fc.weight"])


def test_a_capture_without_an_answer_says_why(tmp_path: Path) -> None:
    def reply(client: int, round_: int, weights: Any, content: RecordDict) -> RecordDict:
        raise ValueError("broken everywhere")

    app = App(model=task.Plain, reply=reply)
    app.run(captured(app, tmp_path / "mine"), 1)
    with pytest.raises(RunError, match="broken everywhere"):
        settled(tmp_path / "mine")


def test_whatever_is_wrong_with_the_words_the_strategy_comes_back(tmp_path: Path) -> None:
    strategy = FedAvg()
    with pytest.warns(CaptureWarning, match="the app is not captured"):
        assert fedsim.capture(strategy, None, model=task.Net) is strategy  # type: ignore[arg-type]
    seen = fedsim.capture(strategy, tmp_path / "mine")
    assert isinstance(seen, CapturedStrategy)


def test_the_log_says_where_the_capture_is(tmp_path: Path, caplog: Any) -> None:
    app = App(model=task.Plain)
    with caplog.at_level("INFO", logger="flwr"):
        app.run(captured(app, tmp_path / "mine"), 1)
    assert json.loads((tmp_path / "mine/capture.json").read_text())["finished"] is True

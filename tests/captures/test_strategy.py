"""A captured app: the same to the last byte, and an observation of every reply."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedYogi,
    Krum,
)

import fedsim
from fedsim.captures.log import read_messages
from fedsim.captures.strategy import CapturedStrategy
from fedsim.captures.trouble import CaptureWarning
from tests import flower_task as task
from tests.flower_app import App, bytes_of, captured, settled, updates


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


@pytest.mark.parametrize(
    ("kind", "clients", "options"),
    [
        (Krum, 4, {}),
        (FedYogi, 2, {}),
        (FedAvgM, 2, {"server_momentum": 0.9}),
    ],
)
def test_robust_and_stateful_strategies_aggregate_as_before(
    tmp_path: Path, kind: Any, clients: int, options: dict[str, Any]
) -> None:
    app = App(model=task.Plain, clients=clients)
    random.seed(0)  # by which Flower samples clients
    plain = app.run(app.strategy(kind, **options), 3)
    strategy = captured(app, tmp_path / "mine", app.strategy(kind, **options))
    random.seed(0)
    assert bytes_of(app.run(strategy, 3)) == bytes_of(plain)
    assert len(updates(settled(tmp_path / "mine"))) == 3 * clients


def test_a_captured_strategy_is_of_the_class_that_it_was(tmp_path: Path) -> None:
    strategy = fedsim.capture(FedYogi(), tmp_path / "mine", model=task.Net)
    for one in (strategy, copy.copy(strategy), copy.deepcopy(strategy)):
        assert isinstance(one, FedYogi)
        assert isinstance(one, CapturedStrategy)
        assert not isinstance(one, Krum)

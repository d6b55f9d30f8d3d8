"""Undeclared: a witness that saw something else than was declared is believed, and one that saw
what only looks like it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from torch.utils.data import DataLoader

import fedsim
from fedsim.core.learning import Update
from fedsim.core.observation import Observation, Public
from fedsim.core.sections import Upload
from fedsim.core.spec import load_spec
from fedsim.core.vault import Truth
from fedsim.scoring.undeclared import COUNT, undeclared
from tests import flower_task as task
from tests.flower_app import App, captured, entry

MATCH: list[dict[str, Any]] = [{"name": "inverting_gradients", "steps": 2}]


def seen(
    batches: list[list[int]], counted: int = 0, images: Any = None, **train: Any
) -> tuple[str, str] | None:
    """The field that a witness of these batches would name, and what it saw; of clients that say
    they have ``counted`` examples."""
    spec = load_spec({"train": {"upload": "delta", "evaluate": False, **train}})
    update = Update(Upload.DELTA, {}, {}, counted * (spec.train.local_epochs or 1))
    count = 1 + max(row for batch in batches for row in batch)
    grid = torch.arange(count).float().view(-1, 1, 1, 1).expand(-1, 3, 8, 8) / 255
    truth = Truth(grid if images is None else images, torch.zeros(count), batches, 0, [])
    found = undeclared(Observation(1, 0, {}, update, Public.of(spec, 2)), truth)
    return None if found is None else (found.field, found.seen)


def test_what_was_declared_and_counted_is_what_was_seen() -> None:
    assert seen([[0, 1], [2]], 3, batch_size=2, local_epochs=1) is None
    assert seen([[0, 1], [2], [2, 0], [1]], 3, batch_size=2, local_epochs=2) is None
    assert seen([[0, 1]], batch_size=2, local_steps=1) is None


def test_examples_that_nobody_counted_are_not_what_an_attack_looks_for() -> None:
    for counted in (1, 2, 0, 100):  # all alike, batches, none, whatever
        told = seen([[0, 1], [2, 3]], counted, batch_size=2, local_epochs=1)
        assert told == (COUNT, "4")
    assert seen([[0]], 0, batch_size=1, local_epochs=1) is None  # which it takes for one


def test_a_last_batch_that_is_left_out_is_named() -> None:
    batches = [[0, 1], [2, 3]]
    assert seen(batches, 5, batch_size=2, local_epochs=1) == ("train.drop_last", "true")
    assert seen(batches, 4, batch_size=2, local_epochs=1, drop_last=True) is None


def test_epochs_are_those_in_which_all_pictures_come_once() -> None:
    twice = [[0, 1, 2], [2, 0, 1]]
    assert seen(twice, 3, batch_size=3, local_epochs=1) == ("train.local_epochs", "2")
    assert seen(twice[:1], 3, batch_size=3, local_epochs=2) == ("train.local_epochs", "1")
    many = [[*range(12)], [*range(11, -1, -1)]]
    assert seen(many, 24, batch_size=12, local_epochs=1) == ("train.local_epochs", "2")


@pytest.mark.parametrize(
    "batches",
    [
        [[0, 0], [1, 1]],  # drawn with replacement
        [[0, 1], [0, 1]],  # two pictures, and their copies
        [[0, 0], [0, 0]],  # one picture, four times
        [[0, 1], [1, 0]],
    ],
)
def test_copies_of_a_picture_are_no_epochs(batches: list[list[int]]) -> None:
    assert seen(batches, 4, batch_size=2, local_epochs=1) is None


def test_smaller_batches_are_seen() -> None:
    told = seen([[0, 1], [2, 3]], 4, batch_size=4, local_epochs=1)
    assert told == ("train.batch_size", "2")
    assert seen([[0, 1, 2]], 3, batch_size=2, local_steps=1) == ("train.batch_size", "3")


def test_pictures_that_were_never_normalised_are_known_off_the_grid_too() -> None:
    coin = torch.Generator().manual_seed(0)
    as_they_are = torch.rand(4, 3, 8, 8, generator=coin)
    batches = [[0, 1, 2, 3]]
    halves = as_they_are * 0.5 + 0.5  # as an audit has them that takes halves back
    found = seen(batches, 4, halves, batch_size=4, local_epochs=1)
    assert found == ("data.mean and data.std", "none (pictures as they are)")
    assert seen(batches, 4, as_they_are, batch_size=4, local_epochs=1) is None
    bright = as_they_are * 0.2 + 0.7
    assert seen(batches, 4, bright, batch_size=4, local_epochs=1) is None


def said(**metrics: Any) -> Any:
    def reply(client: int, round_: int, weights: Any, content: RecordDict) -> RecordDict:
        content["metrics"] = MetricRecord({"train_loss": 2.0, **metrics})
        return content

    return reply


def test_clients_that_count_batches_are_attacked_for_other_pictures(tmp_path: Path) -> None:
    app = App(model=task.Plain, reply=said(**{"num-examples": 2}), witnessed=True)
    app.run(captured(app, tmp_path / "mine"), 1)
    found = entry(fedsim.audit(tmp_path / "mine", attacks=MATCH), "inverting_gradients")
    assert found["verdict"] == "MIS-SPECIFIED"
    assert found["likely"]["field"] == COUNT
    assert "or declare train.local_steps" in found["words"]
    run = fedsim.audit(tmp_path / "mine", "train.local_steps=2", attacks=MATCH)
    assert entry(run, "inverting_gradients")["canary"]["ok"]


def test_a_weight_is_no_count_where_there_is_one(tmp_path: Path) -> None:
    reply = said(**{"weight": 1.0, "num-examples": 6})
    app = App(model=task.Plain, reply=reply, witnessed=True)
    strategy = app.strategy(FedAvg, weighted_by_key="weight", fraction_evaluate=0.0)
    app.run(captured(app, tmp_path / "mine", strategy), 1)
    found = entry(fedsim.audit(tmp_path / "mine", attacks=MATCH), "inverting_gradients")
    assert found["canary"]["ok"]


def test_an_app_that_drops_its_last_batch_says_so(tmp_path: Path) -> None:
    def wrap(batches: Any) -> Any:
        return DataLoader(batches.dataset, batch_size=3, drop_last=True)

    app = App(model=task.Plain, examples=7, wrap=wrap, witnessed=True)
    app.run(captured(app, tmp_path / "mine"), 1)
    found = entry(fedsim.audit(tmp_path / "mine", attacks=MATCH), "inverting_gradients")
    assert found["likely"]["field"] == "train.drop_last"
    run = fedsim.audit(tmp_path / "mine", "train.drop_last=true", attacks=MATCH)
    assert entry(run, "inverting_gradients")["canary"]["ok"]

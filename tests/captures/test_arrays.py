"""Arrays of an app's messages: a full reply, a part, and what is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from fedsim.captures.arrays import Told, arrays_in, is_listed, tensors_of, told_in, update_of

SENT = {
    "w": torch.ones(2),
    "bn.running_mean": torch.zeros(2),
    "bn.num_batches_tracked": torch.tensor(1),
}
TOLD = Told(3, 0.5)


def message(**records: Any) -> Any:
    return SimpleNamespace(content=RecordDict(records))


def test_an_update_is_what_changed_and_statistics_are_as_they_came() -> None:
    received = {"w": torch.full((2,), 3.0), "bn.running_mean": torch.ones(2)}
    update = update_of(SENT, received, TOLD)
    assert torch.equal(update.tensors["w"], torch.full((2,), 2.0))
    assert torch.equal(update.buffers["bn.running_mean"], torch.ones(2))
    assert update.num_examples == 3


def test_what_was_not_sent_is_no_update() -> None:
    with pytest.raises(ValueError, match="'v', which was not sent"):
        update_of(SENT, {"v": torch.ones(2)}, TOLD)


def test_the_record_of_the_key_is_read_or_the_only_one() -> None:
    one, other = ArrayRecord({"w": torch.ones(1)}), ArrayRecord({"w": torch.zeros(1)})
    assert tensors_of(arrays_in(message(a=one, b=other), "b"))["w"] == 0
    assert tensors_of(arrays_in(message(ours=one), "arrays"))["w"] == 1
    with pytest.raises(ValueError, match="2 records of arrays"):
        arrays_in(message(a=one, b=other), "c")


def test_a_count_is_told_where_it_is_one() -> None:
    def told(**metrics: float) -> Told:
        return told_in(message(m=MetricRecord(metrics)), "size")  # type: ignore[arg-type]

    assert told(size=4, loss=0.5) == Told(4, 0.5)
    assert told(size=4.5) == Told(None, None)
    assert told_in(message(m=MetricRecord({"num-examples": 7})), "size").examples == 7


def test_a_list_is_known_by_its_places() -> None:
    assert is_listed({"0": 1, "1": 2})
    assert not is_listed({"0": 1, "w": 2})
    assert not is_listed({})

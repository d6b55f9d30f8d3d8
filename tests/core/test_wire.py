"""The wire: what one side packs, the other unpacks."""

from __future__ import annotations

import io
import pickle
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.supercore.task_identity import TaskIdentity

from fedsim.core import wire
from fedsim.core.errors import ReplyError
from fedsim.core.learning import Update
from fedsim.core.spec import Upload

Record = ArrayRecord | MetricRecord | ConfigRecord


def update(**buffers: torch.Tensor) -> Update:
    tensors = {"head.weight": torch.randn(2, 3), "head.bias": torch.zeros(2)}
    return Update(Upload.DELTA, tensors, buffers, num_examples=7, loss=0.25)


def form(sent: Update, *, partial: bool = False) -> wire.Form:
    tensors, buffers = (
        {name: wire.Blank.of(tensor) for name, tensor in group.items()}
        for group in (sent.tensors, sent.buffers)
    )
    return wire.Form(tensors, buffers, partial)


@pytest.mark.parametrize("buffers", [{}, {"bn.running_mean": torch.ones(3)}])
def test_an_update_arrives_as_it_was_sent(buffers: dict[str, torch.Tensor]) -> None:
    sent = update(**buffers)
    arrived = wire.uploaded(wire.upload(sent), Upload.DELTA, form(sent))
    assert (arrived.kind, arrived.num_examples, arrived.loss) == (Upload.DELTA, 7, 0.25)
    for there, here in ((sent.tensors, arrived.tensors), (sent.buffers, arrived.buffers)):
        assert there.keys() == here.keys()
        assert all(torch.equal(there[name], here[name]) for name in there)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numbers_of_half_the_bytes_arrive_as_they_were_sent(dtype: str) -> None:
    half = {n: t.to(getattr(torch, dtype)) for n, t in update().tensors.items()}
    sent = Update(Upload.DELTA, half, {}, num_examples=7, loss=0.25)
    content = wire.upload(sent)
    arrived = wire.uploaded(content, Upload.DELTA, form(sent))
    for name, tensor in half.items():
        assert arrived.tensors[name].dtype == tensor.dtype
        assert torch.equal(arrived.tensors[name], tensor)
    with pytest.raises(ReplyError, match=r"is of type u?(float|int)16, not float32"):
        wire.uploaded(content, Upload.DELTA, form(update()))


def test_a_client_learns_its_share_and_what_to_evaluate() -> None:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    content = wire.evaluation(ArrayRecord({"w": torch.ones(2)}), 3, wire.Share(1, 4))
    message = Message(content, dst_node_id=5, message_type=MessageType.EVALUATE)
    assert wire.round_of(message) == 3
    assert wire.share_of(message) == (1, 4)
    assert torch.equal(wire.weights_of(message)["w"], torch.ones(2))


def test_an_evaluation_arrives_as_it_was_sent() -> None:
    result = wire.Evaluation(40, 1.5, 0.3)
    assert wire.evaluation_in(wire.evaluated(result)) == result
    with pytest.raises(ReplyError, match="no whole number"):
        wire.evaluation_in(wire.evaluated(wire.Evaluation(float("nan"), 1.5, 0.3)))  # type: ignore[arg-type]


def test_a_node_says_which_client_it_is() -> None:
    config = wire.node_config(3, 8)
    context = Context(run_id=1, node_id=9, node_config=config, state=RecordDict(), run_config={})
    assert wire.client_of(context) == 3
    assert wire.introduced(wire.introduction(3)) == 3


def test_a_fault_is_told_by_its_kind_and_not_by_its_words() -> None:
    assert wire.fault_in(wire.fault("the disk is full")) == "the disk is full"
    assert wire.fault_in(wire.upload(update())) is None


def test_an_update_laid_out_by_columns_arrives_as_it_was() -> None:
    sent = Update(Upload.DELTA, {"w": torch.arange(6.0).reshape(2, 3).t()}, num_examples=1, loss=0)
    arrived = wire.uploaded(wire.upload(sent), Upload.DELTA, form(sent))
    assert torch.equal(arrived.tensors["w"], sent.tensors["w"])
    arrived.tensors["w"].add_(1)  # it is the server's own


def test_what_a_client_may_leave_out_is_left_out_but_never_everything() -> None:
    sent = update(**{"bn.running_mean": torch.ones(3)})
    some = Update(sent.kind, {"head.bias": torch.ones(2)}, {}, 1, 0.5)
    arrived = wire.uploaded(wire.upload(some), Upload.DELTA, form(sent, partial=True))
    assert list(arrived.tensors) == ["head.bias"]
    nothing = wire.upload(Update(sent.kind, {}, {}, 1, 0.5))
    for reply, partial in ((wire.upload(some), False), (nothing, True)):
        with pytest.raises(ReplyError, match="lacks"):
            wire.uploaded(reply, Upload.DELTA, form(sent, partial=partial))


def array(content: np.ndarray, **lies: object) -> Array:
    made = Array(content)
    for name, value in lies.items():
        setattr(made, name, value)
    return made


def headed(shape: tuple[int, ...], descr: str = "<f4", body: bytes = bytes(24)) -> bytes:
    """The bytes of an array whose heading says anything."""
    stream = io.BytesIO()
    head = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, head)
    return stream.getvalue() + body


RIGHT = np.zeros((2, 3), np.float32)
NOT_ARRAYS = {
    "another shape": (array(np.zeros((3, 2), np.float32)), r"shape \(3, 2\), not \(2, 3\)"),
    "a broadcast": (array(np.zeros((2, 2, 3), np.float32)), "shape"),
    "another type": (array(np.zeros((2, 3))), "type float64, not float32"),
    "texts": (array(np.full((2, 3), "x" * 9)), "type <U9"),
    "another packing": (array(RIGHT, stype="pickle"), "type pickle"),
    "a thousand dimensions": (array(RIGHT, shape=(1,) * 1000), "shape"),
    "garbage": (array(RIGHT, data=b"garbage" * 20), "no array"),
    "nothing": (array(RIGHT, data=b""), "0 bytes"),
    "cut short": (array(RIGHT, data=array(RIGHT).data[:-1]), "bytes"),
    "something behind it": (array(RIGHT, data=array(RIGHT).data + b"x"), "bytes"),
    "far too much": (array(RIGHT, data=array(RIGHT).data + bytes(10**6)), "1000152 bytes"),
    "a heading of another shape": (array(RIGHT, data=headed((3, 2))), "another shape or type"),
    "a heading of another type": (array(RIGHT, data=headed((2, 3), "<i4")), "another shape"),
    "a heading of objects": (array(RIGHT, data=headed((2, 3), "|O")), "another shape or type"),
    "a pickle": (array(RIGHT, data=pickle.dumps(RIGHT) + bytes(100)), "no array"),
    "control characters": (array(RIGHT, dtype="\x1b[31m" + "r" * 10**6), r"type \[31mr{50,60}"),
}


@pytest.mark.parametrize("case", NOT_ARRAYS)
def test_bytes_that_are_not_the_array_asked_for_are_refused(case: str) -> None:
    wrong, reason = NOT_ARRAYS[case]
    metrics = MetricRecord({wire.EXAMPLES: 1, wire.TRAIN_LOSS: 0.5})
    reply = RecordDict({"arrays": ArrayRecord(), "metrics": metrics})
    reply["arrays"]["w"] = wrong  # type: ignore[index, assignment]
    blank = {"w": wire.Blank((2, 3), ("float32",))}
    with pytest.raises(ReplyError, match=reason) as caught:
        wire.uploaded(reply, Upload.DELTA, wire.Form(blank))
    assert len(str(caught.value)) < 200
    assert str(caught.value).isprintable()


def test_a_heading_that_lies_about_its_size_allocates_nothing() -> None:
    side = 10**5  # squared, in float32: 40 GB
    lie = array(RIGHT, shape=(side, side), data=headed((side, side)))
    blank = {"w": wire.Blank((side, side), ("float32",))}
    metrics = MetricRecord({wire.EXAMPLES: 1, wire.TRAIN_LOSS: 0.5})
    reply = RecordDict({"arrays": ArrayRecord({"w": lie}), "metrics": metrics})
    tracemalloc.start()
    with pytest.raises(ReplyError, match="bytes"):
        wire.uploaded(reply, Upload.DELTA, wire.Form(blank))
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def without(key: str) -> Callable[[RecordDict], None]:
    return lambda reply: reply.__delitem__(key)


def with_(
    key: str, record: ArrayRecord | MetricRecord | ConfigRecord
) -> Callable[[RecordDict], None]:
    return lambda reply: reply.__setitem__(key, record)


def said(**metrics: object) -> MetricRecord:
    other = {key.replace("_", "-"): value for key, value in metrics.items()}
    named = {wire.EXAMPLES: 1, wire.TRAIN_LOSS: 0.5} | other
    return MetricRecord(named)  # type: ignore[arg-type]


NOT_UPLOADS = {
    "no arrays": (without("arrays"), "lacks the record 'arrays'"),
    "no metrics": (without("metrics"), "lacks the record 'metrics'"),
    "another record": (with_("more", ConfigRecord({"x": bytes(99)})), "record 'more' that was not"),
    "buffers nobody asked for": (with_("buffers", ArrayRecord()), "record 'buffers' that was not"),
    "a text for arrays": (with_("arrays", ConfigRecord({"w": "x"})), "'arrays' holds no arrays"),
    "arrays for metrics": (with_("metrics", ArrayRecord()), "'metrics' holds no metrics"),
    "no array": (with_("arrays", ArrayRecord()), "lacks the array 'head.weight'"),
    "an array too many": (
        with_("arrays", ArrayRecord({**update().tensors, "\x1b]0;x": torch.ones(1)})),
        "array ']0;x' that was not asked for",
    ),
    "a metric too many": (with_("metrics", said(privacy=1)), "metric 'privacy' that was not"),
    "a metric too few": (with_("metrics", MetricRecord({wire.EXAMPLES: 1})), "lacks the metric"),
    "a list": (with_("metrics", said(num_examples=[1, 2])), "'num-examples' is no number"),
    "half an example": (with_("metrics", said(num_examples=0.5)), "no whole number"),
    "more than 64 bits": (with_("metrics", said(num_examples=10**400)), "out of all range"),
}


@pytest.mark.parametrize("case", NOT_UPLOADS)
def test_a_reply_with_other_records_or_metrics_is_refused(case: str) -> None:
    alter, reason = NOT_UPLOADS[case]
    reply = wire.upload(update())
    assert wire.uploaded(reply, Upload.DELTA, form(update())).num_examples == 7
    alter(reply)
    with pytest.raises(ReplyError, match=reason):
        wire.uploaded(reply, Upload.DELTA, form(update()))


@pytest.mark.parametrize(
    ("text", "repeated"),
    [
        ("Traceback\n  File\nValueError: no disk\n", "ValueError: no disk"),
        ("'\x1b[2J\u202ethe vault\x00 is full'>", "[2J the vault is full"),
        ("\ud800 alone", "alone"),
        ("\n \n", "no reason given"),
        (None, "no reason given"),
        (b"bytes", "b'bytes"),
    ],
)
def test_words_of_a_client_are_repeated_without_what_a_terminal_acts_upon(
    text: object, repeated: str
) -> None:
    assert wire.reason_of(text) == repeated


def test_words_of_a_client_are_not_repeated_at_any_length() -> None:
    assert len(wire.reason_of("x" * 10**7)) == 500
    assert wire.fault_in(RecordDict({"fault": ConfigRecord({"reason": "y" * 10**6})})) is not None
    assert len(str(wire.fault_in(wire.fault("y" * 10**6)))) == 500

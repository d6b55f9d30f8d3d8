"""The wire: what one side packs, the other unpacks."""

from __future__ import annotations

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict

from fedsim.core import wire
from fedsim.core.learning import Update
from fedsim.core.spec import Upload


def update(**buffers: torch.Tensor) -> Update:
    tensors = {"head.weight": torch.randn(2, 3), "head.bias": torch.zeros(2)}
    return Update(Upload.DELTA, tensors, buffers, num_examples=7, loss=0.25)


@pytest.mark.parametrize("buffers", [{}, {"bn.running_mean": torch.ones(3)}])
def test_an_update_arrives_as_it_was_sent(buffers: dict[str, torch.Tensor]) -> None:
    sent = update(**buffers)
    arrived = wire.uploaded(wire.upload(sent), Upload.DELTA)
    assert (arrived.kind, arrived.num_examples, arrived.loss) == (Upload.DELTA, 7, 0.25)
    for there, here in ((sent.tensors, arrived.tensors), (sent.buffers, arrived.buffers)):
        assert there.keys() == here.keys()
        assert all(torch.equal(there[name], here[name]) for name in there)


def test_a_client_learns_its_share_and_what_to_evaluate() -> None:
    content = wire.evaluation(ArrayRecord({"w": torch.ones(2)}), 3, wire.Share(1, 4))
    message = Message(content, dst_node_id=5, message_type=MessageType.EVALUATE)
    assert wire.round_of(message) == 3
    assert wire.share_of(message) == (1, 4)
    assert torch.equal(wire.weights_of(message)["w"], torch.ones(2))


def test_an_evaluation_says_whether_it_stands_on_any_sample() -> None:
    assert wire.evaluated_any(wire.evaluated(wire.Evaluation(40, 1.5, 0.3)))
    assert wire.evaluated_any(wire.evaluated(wire.Evaluation(float("nan"), 1.5, 0.3)))
    assert not wire.evaluated_any(wire.evaluated(wire.Evaluation(0, 1.5, 0.3)))


def test_a_node_says_which_client_it_is() -> None:
    config = wire.node_config(3, 8)
    context = Context(run_id=1, node_id=9, node_config=config, state=RecordDict(), run_config={})
    assert wire.client_of(context) == 3
    assert wire.introduced(wire.introduction(3)) == 3


def test_a_fault_is_told_by_its_kind_and_not_by_its_words() -> None:
    assert wire.fault_in(wire.fault("the disk is full")) == "the disk is full"
    assert wire.fault_in(wire.upload(update())) is None

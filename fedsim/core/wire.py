"""The wire: what travels between a client and the server, and the names it travels under.

Both sides make and read their messages here, so that each key is written in one place.
"""

from __future__ import annotations

from typing import NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from fedsim.core.learning import Update
from fedsim.core.spec import Upload

PARTITION, PARTITIONS = "partition-id", "num-partitions"  # Flower's own keys of a node's config
EXAMPLES, TRAIN_LOSS = "num-examples", "train_loss"
TEST_LOSS, TEST_ACCURACY = "test_loss", "test_accuracy"

_ARRAYS, _BUFFERS, _METRICS, _CONFIG, _FAULT = "arrays", "buffers", "metrics", "config", "fault"
_ROUND = "server-round"  # Flower's own key
_PART, _PARTS = "part", "parts"
_REASON = "reason"


class Share(NamedTuple):
    """Which part of the test set a client evaluates: every ``parts``-th sample from ``part``."""

    part: int
    parts: int


class Evaluation(NamedTuple):
    """How a model did on a client's share of the test set."""

    examples: int
    loss: float
    accuracy: float


# -- who is who -----------------------------------------------------------------------------


def client_of(context: Context) -> int:
    """Which client the process with this context is."""
    return int(context.node_config[PARTITION])


def node_config(client: int, clients: int) -> dict[str, int | float | str]:
    """What Flower's runtime tells a node about itself."""
    return {PARTITION: client, PARTITIONS: clients}


def introduction(client: int) -> RecordDict:
    """The answer to the question which client a node is."""
    return RecordDict({_METRICS: MetricRecord({PARTITION: client})})


def introduced(content: RecordDict) -> int:
    """Which client a node says it is."""
    return int(_metrics(content)[PARTITION])  # type: ignore[arg-type]


# -- from the server ------------------------------------------------------------------------


def evaluation(arrays: ArrayRecord, round_: int, share: Share) -> RecordDict:
    """Ask a client to evaluate a model on its share of the test set."""
    config = ConfigRecord({_ROUND: round_, _PART: share.part, _PARTS: share.parts})
    return RecordDict({_ARRAYS: arrays, _CONFIG: config})


def round_of(message: Message) -> int:
    return int(_config(message)[_ROUND])  # type: ignore[arg-type]


def share_of(message: Message) -> Share:
    config = _config(message)
    return Share(int(config[_PART]), int(config[_PARTS]))  # type: ignore[arg-type]


def weights_of(message: Message) -> dict[str, Tensor]:
    """The state dict that was sent."""
    record = next(iter(message.content.array_records.values()))
    return dict(record.to_torch_state_dict())


# -- from a client --------------------------------------------------------------------------


def upload(update: Update) -> RecordDict:
    """An update as a client's reply."""
    metrics = MetricRecord({EXAMPLES: update.num_examples, TRAIN_LOSS: update.loss})
    record = RecordDict({_ARRAYS: _array_record(update.tensors), _METRICS: metrics})
    if update.buffers:
        record[_BUFFERS] = _array_record(update.buffers)
    return record


def uploaded(content: RecordDict, kind: Upload) -> Update:
    """The update in a client's reply."""
    metrics = _metrics(content)
    buffers = content.array_records.get(_BUFFERS)
    return Update(
        kind=kind,
        tensors=dict(content.array_records[_ARRAYS].to_torch_state_dict()),
        buffers=dict(buffers.to_torch_state_dict()) if buffers else {},
        num_examples=int(metrics[EXAMPLES]),  # type: ignore[arg-type]
        loss=float(metrics[TRAIN_LOSS]),  # type: ignore[arg-type]
    )


def as_reply(content: RecordDict, arrays: ArrayRecord) -> RecordDict:
    """A client's reply with other arrays, as a Flower strategy aggregates it."""
    return RecordDict({_ARRAYS: arrays, _METRICS: content[_METRICS]})


def evaluated(result: Evaluation) -> RecordDict:
    """A client's evaluation of a model as its reply."""
    examples, loss, accuracy = result
    metrics = MetricRecord({EXAMPLES: examples, TEST_LOSS: loss, TEST_ACCURACY: accuracy})
    return RecordDict({_METRICS: metrics})


def evaluated_any(content: RecordDict) -> bool:
    """Whether a client evaluated on any sample."""
    return bool(_metrics(content)[EXAMPLES])


def fault(reason: str) -> RecordDict:
    """A reply that says why the testbed, not the client, failed on the client's side."""
    return RecordDict({_FAULT: ConfigRecord({_REASON: reason})})


def fault_in(content: RecordDict) -> str | None:
    """Why the testbed failed on a client's side; None where the reply says no such thing."""
    record = content.config_records.get(_FAULT)
    return None if record is None else str(record.get(_REASON, "no reason given"))


def _array_record(tensors: dict[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({name: tensor.cpu() for name, tensor in tensors.items()})


def _metrics(content: RecordDict) -> MetricRecord:
    return next(iter(content.metric_records.values()))


def _config(message: Message) -> ConfigRecord:
    return next(iter(message.content.config_records.values()))

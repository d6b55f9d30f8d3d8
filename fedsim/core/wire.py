"""The wire: what travels between a client and the server, and the names it travels under.

Both sides make and read their messages here, so that each key is written in one place. What a
client says is read as what anybody could have said: a reply has the records, names, shapes, types
and number of bytes that were agreed on, or it is a `ReplyError`. No pickle is opened, and nothing
is made of an array before its bytes were counted.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.lib import format as npy
from torch import Tensor

from fedsim.core.errors import ReplyError
from fedsim.core.learning import Update
from fedsim.core.spec import Upload

PARTITION, PARTITIONS = "partition-id", "num-partitions"  # Flower's own keys of a node's config
EXAMPLES, TRAIN_LOSS = "num-examples", "train_loss"
TEST_LOSS, TEST_ACCURACY = "test_loss", "test_accuracy"

_ARRAYS, _BUFFERS, _METRICS, _CONFIG, _FAULT = "arrays", "buffers", "metrics", "config", "fault"
_ROUND = "server-round"  # Flower's own key
_PART, _PARTS = "part", "parts"
_REASON, _REFUSED, _DIGEST = "reason", "refused", "digest"
_PROXIMAL = "proximal-mu"  # Flower's own key of what FedProx asks of its clients
_NUMPY = "numpy.ndarray"  # Flower's name for arrays in numpy's own format
_BFLOAT16 = "bfloat16"  # a type that numpy lacks: its bits travel as whole numbers
_TRAVELS = {_BFLOAT16: "uint16"}
_HEADING = 4096  # bytes in which the heading of an array ends; numpy's own are of 128
_WORDS, _NAME = 500, 60  # characters of a client's that are repeated: of a reason, of a name


class Share(NamedTuple):
    """Which part of the test set a client evaluates: every ``parts``-th sample from ``part``."""

    part: int
    parts: int


class Evaluation(NamedTuple):
    """How a model did on a client's share of the test set."""

    examples: int
    loss: float
    accuracy: float


class Blank(NamedTuple):
    """An array that is expected: its shape, and the types it may have, by torch's names."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, tensor: Tensor, *dtypes: str) -> Blank:
        """For an array like this tensor; of other types where they are given."""
        return cls(tuple(tensor.shape), dtypes or (str(tensor.dtype).removeprefix("torch."),))

    @property
    def travelling(self) -> tuple[str, ...]:
        """The types in which it may travel, by numpy's names."""
        return tuple(_TRAVELS.get(dtype, dtype) for dtype in self.dtypes)


@dataclass(frozen=True)
class Form:
    """What an upload holds, by name; ``partial`` where a client may leave some of it out."""

    tensors: Mapping[str, Blank]
    buffers: Mapping[str, Blank] = field(default_factory=dict)
    partial: bool = False


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
    return _whole(_numbers(content, [PARTITION], [_METRICS])[PARTITION], PARTITION)


# -- from the server ------------------------------------------------------------------------


def evaluation(arrays: ArrayRecord, round_: int, share: Share) -> RecordDict:
    """Ask a client to evaluate a model on its share of the test set."""
    config = ConfigRecord({_ROUND: round_, _PART: share.part, _PARTS: share.parts})
    return RecordDict({_ARRAYS: arrays, _CONFIG: config})


def replace_weights(message: Message, weights: Mapping[str, Tensor]) -> None:
    """Send other weights in a message; other messages may share the records of this one."""
    content = message.content
    key = next(iter(content.array_records))
    records = {name: record for name, record in content.items() if name != key}
    message.content = RecordDict({key: _array_record(dict(weights)), **records})


def announcement(round_: int, digest: str) -> RecordDict:
    """Tell a client, before a round, the digest of the weights that it will be sent."""
    return RecordDict({_CONFIG: ConfigRecord({_ROUND: round_, _DIGEST: digest})})


def announced_digest(message: Message) -> tuple[int, str] | None:
    """The round and the digest that a question announces; None where it is another question."""
    config = message.content.config_records.get(_CONFIG)
    if config is None or _DIGEST not in config:
        return None
    return int(config[_ROUND]), str(config[_DIGEST])  # type: ignore[arg-type]


def round_of(message: Message) -> int:
    return int(_config(message)[_ROUND])  # type: ignore[arg-type]


def proximal_of(message: Message) -> float:
    """How strongly a strategy asks its clients to stay near the weights it sends (FedProx)."""
    return float(_config(message).get(_PROXIMAL, 0.0))  # type: ignore[arg-type]


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
    record = RecordDict({_ARRAYS: _array_record(update.tensors), _METRICS: _said_of(update)})
    if update.buffers:
        record[_BUFFERS] = _array_record(update.buffers)
    return record


def uploaded(content: RecordDict, kind: Upload, form: Form) -> Update:
    """The update in a client's reply, of this form to the byte. What its numbers are is not looked
    at: they may be anything that the types can hold."""
    wanted = [_ARRAYS, _METRICS]
    if form.buffers and (_BUFFERS in content or not form.partial):
        wanted.append(_BUFFERS)
    said = _numbers(content, [EXAMPLES, TRAIN_LOSS], wanted)
    examples, loss = _whole(said[EXAMPLES], EXAMPLES), float(said[TRAIN_LOSS])
    tensors = _arrays(content, _ARRAYS, form.tensors, form.partial)
    buffers = _arrays(content, _BUFFERS, form.buffers, form.partial) if len(wanted) > 2 else {}
    return Update(kind, tensors, buffers, examples, loss)


def as_reply(update: Update, arrays: ArrayRecord) -> RecordDict:
    """A client's reply with other arrays, as a Flower strategy aggregates it."""
    return RecordDict({_ARRAYS: arrays, _METRICS: _said_of(update)})


def evaluated(result: Evaluation) -> RecordDict:
    """A client's evaluation of a model as its reply."""
    examples, loss, accuracy = result
    metrics = MetricRecord({EXAMPLES: examples, TEST_LOSS: loss, TEST_ACCURACY: accuracy})
    return RecordDict({_METRICS: metrics})


def evaluation_in(content: RecordDict) -> Evaluation:
    """The evaluation in a client's reply."""
    said = _numbers(content, [EXAMPLES, TEST_LOSS, TEST_ACCURACY], [_METRICS])
    examples = _whole(said[EXAMPLES], EXAMPLES)
    return Evaluation(examples, float(said[TEST_LOSS]), float(said[TEST_ACCURACY]))


def fault(reason: str) -> RecordDict:
    """A reply that says why the testbed, not the client, failed on the client's side."""
    return RecordDict({_FAULT: ConfigRecord({_REASON: reason})})


def fault_in(content: RecordDict) -> str | None:
    """Why the testbed failed on a client's side; None where the reply says no such thing."""
    record = content.config_records.get(_FAULT)
    return None if record is None else reason_of(record.get(_REASON, ""))


def refusal(words: str) -> RecordDict:
    """A reply that says why a client does not upload: its guards did not like what it was sent."""
    return RecordDict({_REFUSED: ConfigRecord({_REASON: words})})


def refusal_in(content: RecordDict) -> str | None:
    """Why a client did not upload; None where the reply says no such thing."""
    record = content.config_records.get(_REFUSED)
    return None if record is None else reason_of(record.get(_REASON, ""))


def reason_of(text: object) -> str:
    """The last line of a client's error, without the wrapping of the runtime, as far as it can be
    repeated: not at any length, and no control characters."""
    lines = [line.strip(" '\">") for line in str(text or "")[-10_000:].splitlines()]
    said = [line for line in lines if line]
    return _printable(said[-1], _WORDS) if said else "no reason given"


# -- reading what anybody could have sent ---------------------------------------------------


def _numbers(
    content: RecordDict, keys: Collection[str], records: Collection[str]
) -> dict[str, int | float]:
    """The metrics of a reply that has these records and no others, and these metrics and no
    others, each of them one number."""
    _check_names("record", content, records)
    metrics = content[_METRICS]
    if not isinstance(metrics, MetricRecord):
        raise ReplyError(f"its record '{_METRICS}' holds no metrics")
    _check_names("metric", metrics, keys)
    numbers = {}
    for key in keys:
        value = metrics[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ReplyError(f"its metric '{key}' is no number")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ReplyError(f"its metric '{key}' is out of all range")
        numbers[key] = value
    return numbers


def _whole(number: int | float, key: str) -> int:
    if not isinstance(number, int):
        raise ReplyError(f"its metric '{key}' is no whole number")
    return number


def _arrays(
    content: RecordDict, key: str, blanks: Mapping[str, Blank], partial: bool
) -> dict[str, Tensor]:
    """The tensors of one record, in the order in which they are expected."""
    record = content[key]
    if not isinstance(record, ArrayRecord):
        raise ReplyError(f"its record '{key}' holds no arrays")
    _check_names("array", record, blanks, partial)
    present = {name: blank for name, blank in blanks.items() if name in record}
    for name, blank in present.items():  # all of them, before the first is opened
        _check_declared(name, record[name], blank)
    return {name: _tensor(_opened(name, record[name]), blank) for name, blank in present.items()}


def _tensor(numbers: np.ndarray, blank: Blank) -> Tensor:
    tensor = torch.from_numpy(numbers)
    half = _BFLOAT16 in blank.dtypes and tensor.dtype == torch.uint16
    return tensor.view(torch.bfloat16) if half else tensor


def _check_names(
    what: str, found: Collection[str], wanted: Collection[str], partial: bool = False
) -> None:
    unknown = next((name for name in found if name not in wanted), None)
    if unknown is not None:
        raise ReplyError(f"it holds a {what} '{_printable(unknown, _NAME)}' that was not asked for")
    missing = next((name for name in wanted if name not in found), None)
    if missing is not None and (not partial or not found):
        raise ReplyError(f"it lacks the {what} '{missing}'")


def _check_declared(name: str, array: Array, blank: Blank) -> None:
    """Raise where an array is not said to be what is expected, or has more or fewer bytes."""
    if array.stype != _NUMPY or array.dtype not in blank.travelling:
        found = _printable(array.dtype if array.stype == _NUMPY else array.stype, _NAME)
        raise ReplyError(f"'{name}' is of type {found}, not {' or '.join(blank.dtypes)}")
    if tuple(array.shape) != blank.shape:
        found = _printable(tuple(array.shape)[:8], _NAME)
        raise ReplyError(f"'{name}' has the shape {found}, not {blank.shape}")
    size, numbers = len(array.data), math.prod(blank.shape) * np.dtype(array.dtype).itemsize
    if not numbers <= size <= numbers + _HEADING:
        raise ReplyError(f"'{name}' comes in {size} bytes, and its numbers take {numbers}")


def _opened(name: str, array: Array) -> np.ndarray:
    """An array whose heading, in numpy's format, says what its record says of it."""
    start = io.BytesIO(array.data[:_HEADING])
    try:
        if npy.read_magic(start) != (1, 0):
            raise ValueError("another version of the format")
        shape, by_columns, dtype = npy.read_array_header_1_0(start)
    except Exception as error:  # whatever a parser makes of meaningless bytes
        raise ReplyError(f"the bytes of '{name}' are no array") from error
    count = math.prod(array.shape)
    if shape != tuple(array.shape) or dtype != np.dtype(array.dtype):
        raise ReplyError(f"the bytes of '{name}' are of another shape or type than it says")
    if len(array.data) - start.tell() != count * dtype.itemsize:
        raise ReplyError(f"'{name}' has more or fewer bytes than its shape takes")
    flat = np.frombuffer(array.data, dtype, count, start.tell()).copy()  # bytes cannot be changed
    return flat.reshape(shape[::-1]).transpose() if by_columns else flat.reshape(shape)


def _printable(text: object, limit: int) -> str:
    """The beginning of a text that came from outside, without what a terminal would act upon."""
    start = str(text)[: 4 * limit]
    clean = " ".join("".join(c if c.isprintable() else " " for c in start).split())
    return clean if len(clean) <= limit else f"{clean[: limit - 3]}..."


def _said_of(update: Update) -> MetricRecord:
    return MetricRecord({EXAMPLES: update.num_examples, TRAIN_LOSS: update.loss})


def _array_record(tensors: dict[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({name: _travelling(tensor.cpu()) for name, tensor in tensors.items()})


def _travelling(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor


def _config(message: Message) -> ConfigRecord:
    return next(iter(message.content.config_records.values()))

"""Arrays: what is in the messages of somebody's app, as an observation has it.

Their records are read and never touched. What a client sent back is full weights, or those of a
part of the model; the update is how far they are from what it was sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from flwr.app import Message
from torch import Tensor

from fedsim.core.learning import Update
from fedsim.core.sections import Upload

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of BatchNorm layers
EXAMPLES = ("num-examples", "num_examples")
Arrays = dict[str, Any]  # Flower's arrays by their names, as they were in the message


class Told(NamedTuple):
    """What a reply says beside its arrays."""

    examples: int | None
    loss: float | None


def arrays_in(message: Message, key: str | None = None) -> Arrays:
    """The arrays of a message, under the record of this key or else the only one; the mapping is a
    copy, the arrays are theirs. A ValueError where there are none."""
    records = dict(message.content.array_records)
    record = records.get(key) if key is not None else None
    if record is None and len(records) == 1:
        record = next(iter(records.values()))
    if record is None:
        raise ValueError(f"it has {len(records)} records of arrays, none of them '{key}'")
    return dict(record)


def config_in(message: Message) -> dict[str, Any]:
    """Every value of the configuration that a message carries."""
    found: dict[str, Any] = {}
    for record in message.content.config_records.values():
        found |= {k: v for k, v in record.items() if isinstance(v, str | int | float | bool)}
    return found


def told_in(message: Message, examples: str) -> Told:
    """How many examples a client says it learned from, and its loss; None where it does not."""
    metrics: dict[str, Any] = {}
    for record in message.content.metric_records.values():
        metrics |= dict(record)
    known = [key for key in (*EXAMPLES, examples) if key in metrics]  # weights may be no counts
    count = metrics[known[0]] if known else None
    losses = [metrics[k] for k in ("train_loss", "train-loss", "loss") if k in metrics]
    counted = int(count) if isinstance(count, int | float) and 0 <= count < 2**53 else None
    lost = losses[0] if losses and isinstance(losses[0], int | float) else None
    return Told(counted if counted == count else None, None if lost is None else float(lost))


def tensors_of(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Flower's arrays as tensors of their own memory."""
    found = {}
    for name, array in arrays.items():
        numbers = array.numpy()
        found[name] = torch.from_numpy(numbers.copy() if not numbers.flags.writeable else numbers)
    return found


def nbytes(arrays: Mapping[str, Any]) -> int:
    return sum(len(array.data) for array in arrays.values())


def is_listed(names: Mapping[str, Any]) -> bool:
    """Whether arrays came as a list: their names are their places."""
    return bool(names) and list(names) == [str(place) for place in range(len(names))]


def update_of(sent: Mapping[str, Tensor], received: Mapping[str, Tensor], told: Told) -> Update:
    """The update behind a reply; a ValueError where it is not of what was sent."""
    strange = sorted(received.keys() - sent.keys())
    if strange:
        raise ValueError(f"it has '{strange[0]}', which was not sent")
    tensors, buffers = {}, {}
    for name, tensor in received.items():
        if tensor.shape != sent[name].shape:
            shapes = f"{tuple(tensor.shape)}, not {tuple(sent[name].shape)}"
            raise ValueError(f"its '{name}' is of shape {shapes} as it was sent")
        # Without dimensions it may be a counter, which averaging made a float.
        if tensor.ndim and sent[name].is_floating_point() and not tensor.is_floating_point():
            kinds = f"{tensor.dtype}, and {sent[name].dtype} was sent".replace("torch.", "")
            raise ValueError(f"its '{name}' is of {kinds}")
        if name.rpartition(".")[2] in STATISTICS or not tensor.is_floating_point():
            buffers[name] = tensor
        else:
            tensors[name] = tensor - sent[name].to(tensor.dtype)
    return Update(Upload.DELTA, tensors, buffers, told.examples or 0, told.loss or 0.0)

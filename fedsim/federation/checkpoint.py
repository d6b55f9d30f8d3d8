"""Checkpoint: how far a run got, in one file: its rounds, its model, its strategy's memory.

FedAdam, FedYogi and FedAdagrad keep moments by parameter, FedAvgM a list of them. What a strategy
last sent is left out: it is given that again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.serverapp.strategy import Strategy
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fedsim.core.errors import DamagedError, ForeignCheckpointError, RunError
from fedsim.core.files import read_tensors, save_tensors
from fedsim.core.run import Run
from fedsim.core.run.rounds import as_table, is_foreign, rows_in

_MEMORY = TypeAdapter(dict[str, Any])
_PREFIX = "state of the server/"  # no parameter of a model has a slash in its name
_SENT = "current_arrays"


class Checkpoint(NamedTuple):
    """How far a run got: a row for every round done, the global model after them, and what the
    wrapped strategy and an active server remember of them."""

    rows: list[dict[str, Any]]
    arrays: dict[str, Tensor]
    state: dict[str, Tensor]
    memory: Mapping[str, Any] = MappingProxyType({})  # of an active server's manoeuvre


def read_checkpoint(run: Run) -> Checkpoint:
    """How far a run got; nothing, for a new one. A checkpoint of another run is an error."""
    if not run.checkpoint.is_file():
        return Checkpoint([], {}, {})
    try:
        tensors, metadata = read_tensors(run.checkpoint)
        rows = rows_in(metadata)
        memory = _MEMORY.validate_json(metadata.get("memory", "{}"))
    except (DamagedError, ValidationError) as error:
        raise RunError(
            f"'{run.checkpoint}' is damaged ({type(error).__name__}); go on with `fedsim audit "
            f"--resume` and the rounds are done again."
        ) from error
    if is_foreign(metadata, run.present_digest()):
        raise ForeignCheckpointError(
            f"'{run.checkpoint}' is of a run of another spec ({metadata['spec']}); put back "
            f"its own."
        )
    arrays, remembered = split(tensors)
    return Checkpoint(rows, arrays, remembered, memory)


def write_checkpoint(run: Run, checkpoint: Checkpoint) -> None:
    """Rounds and model in one file, so that they cannot disagree after a crash."""
    tensors = joined(checkpoint.arrays, checkpoint.state)
    about = {"rounds": json.dumps(checkpoint.rows)}
    if (spec := run.present_digest()) is not None:
        about["spec"] = spec
    if checkpoint.memory:
        about["memory"] = json.dumps(dict(checkpoint.memory))
    save_tensors(run.checkpoint, tensors, about)
    write_rounds(run, checkpoint.rows)


def write_rounds(run: Run, rows: list[dict[str, Any]]) -> None:
    run.write_table("rounds", as_table(rows))


def held_by(strategy: Strategy) -> dict[str, Tensor]:
    """Every array a strategy holds, by attribute and by its place in the attribute."""
    arrays = {}
    for attribute, value in vars(strategy).items():
        for place, array in _arrays(value) if attribute != _SENT else []:
            arrays[f"{attribute}/{place}"] = torch.tensor(np.asarray(array))
    return arrays


def restore(strategy: Strategy, remembered: Mapping[str, Tensor]) -> None:
    """Give a strategy back what `held_by` collected; a file names nothing else of it."""
    groups: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in remembered.items():
        attribute, _, place = name.partition("/")
        groups.setdefault(attribute, {})[place] = tensor.numpy()
    for attribute, group in groups.items():
        if not _may_hold(strategy, attribute):
            raise RunError(
                f"the checkpoint holds a '{attribute}', and a {type(strategy).__name__} does not: "
                f"it is damaged, or another run's."
            )
        counted = all(place.isdigit() for place in group)
        listed = [group[place] for place in sorted(group, key=int)] if counted else None
        setattr(strategy, attribute, listed if counted else group)


def _may_hold(strategy: Strategy, attribute: str) -> bool:
    """Whether an attribute is one for arrays, be they there or still to come."""
    value = vars(strategy).get(attribute, "absent")
    empty = value is None or (isinstance(value, dict | list) and not value)
    return attribute != _SENT and (empty or bool(_arrays(value)))


def joined(arrays: Mapping[str, Tensor], remembered: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Model and state in one mapping."""
    return {**arrays, **{f"{_PREFIX}{name}": tensor for name, tensor in remembered.items()}}


def split(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Model and state apart again."""
    model = {n: t for n, t in tensors.items() if not n.startswith(_PREFIX)}
    rest = {n.removeprefix(_PREFIX): t for n, t in tensors.items() if n.startswith(_PREFIX)}
    return model, rest


def _arrays(value: Any) -> list[tuple[str, Any]]:
    """The arrays of a mapping or a list of arrays; of anything else, none."""
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(str(place), item) for place, item in enumerate(value)]
    else:
        return []
    return items if all(isinstance(i, np.ndarray | np.generic) for _, i in items) else []

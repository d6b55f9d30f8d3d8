"""Server state: what a Flower strategy remembers between rounds, as tensors for the checkpoint.

FedAdam, FedYogi and FedAdagrad keep moments by parameter, FedAvgM a list of them. What a strategy
last sent is not counted: it is given that again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.serverapp.strategy import Strategy
from torch import Tensor

_PREFIX = "state of the server/"  # no parameter of a model has a slash in its name
_SENT = "current_arrays"


def held_by(strategy: Strategy) -> dict[str, Tensor]:
    """Every array a strategy holds, by attribute and by its place in there."""
    found = {}
    for attribute, value in vars(strategy).items():
        for place, array in _arrays(value) if attribute != _SENT else []:
            found[f"{attribute}/{place}"] = torch.tensor(np.asarray(array))
    return found


def restore(strategy: Strategy, remembered: Mapping[str, Tensor]) -> None:
    """Give a strategy back what `held_by` took down."""
    groups: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in remembered.items():
        attribute, _, place = name.partition("/")
        groups.setdefault(attribute, {})[place] = tensor.numpy()
    for attribute, group in groups.items():
        counted = all(place.isdigit() for place in group)
        listed = [group[place] for place in sorted(group, key=int)] if counted else None
        setattr(strategy, attribute, listed if counted else group)


def joined(arrays: Mapping[str, Tensor], remembered: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Model and state in one mapping."""
    return {**arrays, **{f"{_PREFIX}{name}": tensor for name, tensor in remembered.items()}}


def split(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Model and state apart again."""
    model = {n: t for n, t in tensors.items() if not n.startswith(_PREFIX)}
    rest = {n.removeprefix(_PREFIX): t for n, t in tensors.items() if n.startswith(_PREFIX)}
    return model, rest


def _arrays(value: Any) -> list[tuple[str, Any]]:
    """The arrays of a mapping or a list of them, none of anything else."""
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(str(place), item) for place, item in enumerate(value)]
    else:
        return []
    return items if all(isinstance(i, np.ndarray | np.generic) for _, i in items) else []

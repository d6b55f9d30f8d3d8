"""Notebook: what an attack writes down while it works, to go on from after a crash."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fedsim.core.errors import DamagedError
from fedsim.core.files import read_tensors, save_tensors

Page = tuple[dict[str, Tensor], dict[str, Any]]


class Notebook:
    """One page of tensors and JSON, replaced as a whole; `page` opens others beside it."""

    def __init__(self, path: Path):
        self.path = path
        self.damaged = False  # whether there was a page that could not be read

    def page(self, name: str) -> Notebook:
        """Another page, for another stage of the work."""
        return Notebook(self.path.with_suffix(f".{name}{self.path.suffix}"))

    def save(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        page = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_tensors(self.path, page, {"about": json.dumps(dict(about))})

    def load(self) -> Page | None:
        """The page, or None where there is none or it is damaged: the work then starts afresh."""
        if not self.path.is_file():
            return None
        try:
            tensors, metadata = read_tensors(self.path)
            return tensors, json.loads(metadata["about"])
        except (DamagedError, KeyError, ValueError, RecursionError):
            self.damaged = True
            self.clear()
            return None

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """The state of an optimiser like Adam, for a page."""
    states = optimizer.state_dict()["state"]
    return {f"adam.{i}.{key}": value for i, state in states.items() for key, value in state.items()}


def restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give an optimiser the state that `optimizer_tensors` wrote down."""
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("adam."):
            _, number, key = name.split(".")
            states.setdefault(int(number), {})[key] = value
    content = optimizer.state_dict()
    content["state"] = states
    optimizer.load_state_dict(content)

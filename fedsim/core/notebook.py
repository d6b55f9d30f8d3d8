"""Notebook: what an attack writes down while it works, to go on from after a crash."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from torch import Tensor
from torch.optim import Optimizer

from fedsim.core.errors import DamagedError
from fedsim.core.files import read_tensors, save_tensors
from fedsim.core.ledger import Ledger

Page = tuple[dict[str, Tensor], dict[str, Any]]

_Name = Annotated[str, Field(pattern="^[a-z_]{1,40}$")]
_NAMES = TypeAdapter(Annotated[list[_Name], Field(max_length=64)])


# What a page from before pages said it is taken to rest on.
_FROM_BEFORE = ["update"]


class Notebook:
    """One page of tensors and JSON, replaced as a whole; `page` opens others beside it.

    Given the ``ledger`` of an attack, a page keeps what had been read when it was written, and
    whoever goes on from it has read that too.
    """

    def __init__(self, path: Path, ledger: Ledger | None = None):
        self.path, self.ledger = path, ledger
        self.damaged = False  # whether there was a page that could not be read

    def page(self, name: str) -> Notebook:
        """Another page, for another stage of the work."""
        return Notebook(self.path.with_suffix(f".{name}{self.path.suffix}"), self.ledger)

    def save(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        page = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        metadata = {"about": json.dumps(dict(about))}
        if self.ledger is not None:
            metadata["ledger"] = json.dumps(list(self.ledger))
        save_tensors(self.path, page, metadata)

    def load(self) -> Page | None:
        """The page, or None where there is none or it is damaged: the work then starts afresh."""
        if not self.path.is_file():
            return None
        try:
            tensors, metadata = read_tensors(self.path)
            about, read = json.loads(metadata["about"]), metadata.get("ledger")
            before = _NAMES.validate_json(read) if read is not None else _FROM_BEFORE
            if self.ledger is not None:
                for name in before:
                    self.ledger.note(name)
            return tensors, about
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

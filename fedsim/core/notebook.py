"""Notebook: where an attack keeps what it must not lose, between steps and after a crash."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedsim.core.store import save_tensors

Page = tuple[dict[str, Tensor], dict[str, Any]]


class Notebook:
    """One page of tensors and JSON, replaced as a whole."""

    def __init__(self, path: Path):
        self.path = path
        self.damaged = False  # whether a page was there that could not be read

    def save(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_tensors(self.path, kept, {"about": json.dumps(dict(about))})

    def load(self) -> Page | None:
        """The page, or None where there is none or it is damaged: the work then starts afresh."""
        if not self.path.is_file():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return tensors, json.loads(file.metadata()["about"])
        except (SafetensorError, KeyError, TypeError, ValueError):
            self.damaged = True
            self.clear()
            return None

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

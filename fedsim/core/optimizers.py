"""Optimisers: what takes a client's local steps, and by which learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import nn

OptimizerName = Literal["sgd", "adam", "adamw"]
Betas = tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]

_LOW, _LOWEST = 1 / 25, 1e-4  # of one_cycle: its start, and its end as a share of that


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Schedule:
    """How a learning rate changes over steps or rounds, as a share of itself.

    ``final`` is what ``cosine`` and ``linear`` go towards; ``step`` takes the ``factor`` after
    ``every`` so many; ``one_cycle`` rises to the whole over the share ``rise`` and falls to next to
    nothing. As torch's schedulers of these names, which leave momentum alone here.
    """

    name: Literal["constant", "cosine", "step", "linear", "one_cycle"] = "constant"
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    every: Annotated[int, Field(ge=1)] = 1
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    rise: Annotated[float, Field(gt=0, lt=1)] = 0.3

    def share(self, at: int, total: int) -> float:
        """Of the learning rate, at one of ``total`` steps or rounds, counted from 0."""
        match self.name:
            case "constant":
                return 1.0
            case "cosine":
                return _between(1.0, self.final, at / total)
            case "linear":
                return 1.0 + (self.final - 1.0) * at / total
            case "step":
                return self.factor ** (at // self.every)
            case "one_cycle":
                return self._cycle(at, total)

    def _cycle(self, at: int, total: int) -> float:
        if total == 1:  # the one step there is
            return 1.0
        top = self.rise * total - 1
        if top > 0 and at <= top:
            return _between(_LOW, 1.0, at / top)
        return _between(1.0, _LOW * _LOWEST, (at - top) / (total - 1 - top))


def _between(first: float, last: float, way: float) -> float:
    """A number on half a wave of the cosine from ``first`` to ``last``."""
    return last + (first - last) * (1 + math.cos(math.pi * way)) / 2


def create_optimizer(
    weights: Iterable[nn.Parameter],
    name: OptimizerName,
    *,
    lr: float,
    momentum: float,
    betas: Betas,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """torch's own optimiser of this name."""
    options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    match name:
        case "sgd":
            return torch.optim.SGD(weights, momentum=momentum, **options)
        case "adam":
            return torch.optim.Adam(weights, betas=betas, **options)
        case "adamw":
            return torch.optim.AdamW(weights, betas=betas, **options)

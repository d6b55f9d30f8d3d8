"""LoRA: what a spec says of low-rank adapters (Hu et al. 2021), and of what is trained at all."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Pattern = Annotated[str, Field(min_length=1)]
Trainable = Pattern | tuple[Pattern, ...]

LORA = "lora"
WORDS = ("all", "head", "norm", "bias", LORA)


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Lora:
    """Adapters of rank ``r``: a layer W x becomes  W x + (alpha / r) B A x, with B = 0 at first.
    ``targets``: patterns of the layers that get one; none: every linear layer inside the blocks of
    a transformer (queries, keys and values, projections, MLPs)."""

    r: Annotated[int, Field(ge=1)] = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0
    targets: tuple[Pattern, ...] = ()


def wanted(trainable: Trainable) -> tuple[str, ...]:
    """The words and patterns of a choice."""
    return (trainable,) if isinstance(trainable, str) else trainable

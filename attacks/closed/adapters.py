"""Adapters: what the gradients of LoRA tell of the gradient of the layer they stand beside.

A layer with an adapter computes  W x + s B A x,  and only A (r, n) and B (m, r) are trained. With
dW the gradient that W would have had,

    dA = s B^T dW        dB = s dW A^T,

so of dW the client uploads r combinations of its rows and r of its columns. Adapters begin with
B = 0: then dA is zero in the first step, and from the second on it is not. Derived here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.core.trainable import adapted_layers

_BASE = ".base_layer.weight"


@dataclass(frozen=True)
class Adapter:
    """The adapter of one layer, in float64: its matrices, their names, and its scale."""

    down: Tensor  # A, (r, n)
    up: Tensor  # B, (m, r)
    names: tuple[str, str]  # of A and B
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)

    @property
    def moved(self) -> bool:
        """Whether B is no longer zero, so that A has a gradient."""
        return bool(self.up.any())

    def rows(self, update: Mapping[str, Tensor]) -> Tensor | None:
        """B^T dW, (r, n): combinations of the rows of dW; None where they were not uploaded or are
        zero."""
        return self._read(update, 0)

    def columns(self, update: Mapping[str, Tensor]) -> Tensor | None:
        """dW A^T, (m, r): combinations of its columns."""
        return self._read(update, 1)

    def _read(self, update: Mapping[str, Tensor], which: int) -> Tensor | None:
        tensor = update.get(self.names[which])
        if tensor is None or not bool(torch.isfinite(tensor).all()) or not bool(tensor.any()):
            return None
        return tensor.double().cpu().flatten(1) / self.scale


def adapter_of(model: nn.Module, weight: str) -> Adapter | None:
    """The adapter beside a weight; None where it has none, or one of another kind than plain
    LoRA."""
    names = adapter_names(model, weight)
    if names is None:
        return None
    down, up = (model.get_parameter(name).detach().double().cpu().flatten(1) for name in names)
    place, _, rest = names[0].partition(".lora_A.")
    scaling: Any = model.get_submodule(place).scaling
    return Adapter(down, up, names, float(scaling[rest.removesuffix(".weight")]))


def adapter_names(model: nn.Module, weight: str) -> tuple[str, str] | None:
    """The names of A and B beside a weight."""
    place = weight.removesuffix(_BASE)
    layer: Any = adapted_layers(model).get(place) if weight.endswith(_BASE) else None
    if layer is None:
        return None
    kinds = list(layer.lora_A)
    if len(kinds) != 1 or getattr(layer, "lora_magnitude_vector", None):
        return None
    return f"{place}.lora_A.{kinds[0]}.weight", f"{place}.lora_B.{kinds[0]}.weight"


def adapter_ranks(model: nn.Module, weights: Iterable[str], trained: Collection[str]) -> list[int]:
    """The ranks of the adapters beside these weights, as far as they are trained: by shapes alone,
    which a model without numbers has as well."""
    named = [names for weight in weights if (names := adapter_names(model, weight))]
    return [len(model.get_parameter(down)) for down, up in named if {down, up} <= set(trained)]

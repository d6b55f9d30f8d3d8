"""Withheld gradients: parts of the model are trained by nobody, so nothing of them is uploaded.

The position embedding and the patch projection are what the closed forms on a ViT solve; the head
is where labels are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from fedsim.core.anatomy import head_names, tensor_of, vit_parts
from fedsim.core.defense import Defense
from fedsim.core.errors import ModelError

Part = Literal["position", "patches", "cls", "head"]


@dataclass(frozen=True)
class Withheld(Defense):
    """``parts``: what stays as it was initialised."""

    parts: list[Part] = field(default_factory=lambda: ["position"])

    def prepare_model(self, model: nn.Module) -> nn.Module:
        for part in self.parts:
            names = self._names(model, part)
            if not names:
                raise ModelError(f"withheld: the model has no {part} to withhold.")
            for name in names:
                tensor_of(model, name).requires_grad_(False)
        return model

    def _names(self, model: nn.Module, part: Part) -> list[str]:
        if part == "head":
            return head_names(model)
        parts = vit_parts(model)
        names = {
            "position": [parts.position],
            "patches": [parts.patch_weight, parts.patch_bias],
            "cls": [parts.cls_token],
        }[part]
        return [name for name in names if name is not None]

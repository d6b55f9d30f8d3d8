"""Presets: parameters that come together, as a paper sets them or as a small machine bears them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

PresetName = Literal["paper", "cpu"]
PRESET: Any = None  # a parameter's default, where it is the preset's


@dataclass(frozen=True, kw_only=True)
class PresetParameters:
    """``preset`` paper: everything as the paper sets it, for a GPU. ``cpu``: a few hundred steps on
    a small network, with a schedule of the same shape. What is given wins over the preset."""

    presets: ClassVar[dict[str, dict[str, Any]]]

    preset: PresetName = "cpu"

    def __post_init__(self) -> None:
        for name, value in self.presets[self.preset].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

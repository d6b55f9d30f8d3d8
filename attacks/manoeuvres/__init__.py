"""The manoeuvres: what an active server (threats F, G, H) sends, one file each.

A manoeuvre is a dataclass of its parameters that derives from `fedsim.core.manoeuvre.Manoeuvre`. To
add one, write the file and add its line here, or name it in a spec by its import path
``package.module:Class``. One that decodes for itself is also an attack of the same name.
"""

from __future__ import annotations

from typing import Any

from fedsim.core.manoeuvre import Manoeuvre
from fedsim.core.registry import build_as

__all__ = ["MANOEUVRES", "Manoeuvre", "create_manoeuvre"]

MANOEUVRES: dict[str, str] = {
    "fishing": "fedsim.attacks.manoeuvres.fishing:Fishing",
    "imprint": "fedsim.attacks.manoeuvres.imprint:ImprintWeights",
    "imprint_layer": "fedsim.attacks.manoeuvres.imprint_layer:ImprintLayer",
    "inconsistent": "fedsim.attacks.manoeuvres.inconsistent:Inconsistent",
}


def create_manoeuvre(name: str, **params: Any) -> Manoeuvre:
    """The manoeuvre called ``name``, its parameters checked."""
    return build_as("manoeuvre", MANOEUVRES, Manoeuvre, name, params)

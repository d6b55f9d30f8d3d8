"""The guards: what a client checks before it trains and uploads, one file each.

A guard is a dataclass of its parameters that derives from `fedsim.core.guard.Guard`. To add one,
write the file and add its line here, or name it in a spec by its import path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedsim.core.guard import Guard
from fedsim.core.registry import build_as, refuse_twice
from fedsim.core.spec import Component, Spec

__all__ = ["COMPARING", "GUARDS", "Guard", "compares", "create_guard", "create_guards"]

COMPARING = "same_model"  # the guard for which clients tell each other what they received

GUARDS: dict[str, str] = {
    "d_snr": "fedsim.defenses.guards.d_snr:DSnr",
    "loss_jump": "fedsim.defenses.guards.loss_jump:LossJump",
    "same_model": "fedsim.defenses.guards.same_model:SameModel",
    "weight_check": "fedsim.defenses.guards.weight_check:WeightCheck",
}


def create_guard(name: str, **params: Any) -> Guard:
    """The guard called ``name``, its parameters checked."""
    return build_as("guard", GUARDS, Guard, name, params)


def create_guards(components: Iterable[Component | Mapping[str, Any]]) -> list[Guard]:
    """A client's guards, in the order in which they look."""
    listed = [Component.model_validate(component) for component in components]
    refuse_twice("guard", [component.name for component in listed])
    return [create_guard(component.name, **component.params) for component in listed]


def compares(spec: Spec) -> bool:
    """Whether the clients of a federation tell each other what they receive."""
    return any(component.name == COMPARING for component in spec.guards)

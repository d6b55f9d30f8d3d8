"""The guards: what a client checks before it trains and uploads, one file each.

A guard is a dataclass of its parameters that derives from `fedsim.core.guard.Guard`. To add one,
write the file and add its line here, or name it in a spec by its import path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedsim.core.errors import SpecError
from fedsim.core.guard import Guard
from fedsim.core.registry import build
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
    guard = build("guard", GUARDS, name, params)
    if not isinstance(guard, Guard):
        raise SpecError(f"the guard '{name}' must derive from fedsim.core.guard.Guard.")
    return guard


def create_guards(components: Iterable[Component | Mapping[str, Any]]) -> list[Guard]:
    """A client's guards, in the order in which they look."""
    listed = [Component.model_validate(component) for component in components]
    names = [component.name for component in listed]
    for name in names:
        if names.count(name) > 1:
            raise SpecError(f"the guard '{name}' is listed twice.")
    return [create_guard(component.name, **component.params) for component in listed]


def compares(spec: Spec) -> bool:
    """Whether the clients of a federation tell each other what they receive."""
    return any(component.name == COMPARING for component in spec.guards)

"""The defenses: one file each. They import only `fedsim.core`.

A defense is a dataclass of its parameters that overrides the hooks of
`fedsim.core.defense.Defense` it needs. To add one, write the file and add its line here, or
name it in a spec by its import path ``package.module:Class``.
"""

from __future__ import annotations

from typing import Any

from fedsim.core.defense import Defense
from fedsim.core.errors import SpecError
from fedsim.core.registry import build
from fedsim.core.spec import Component

DEFENSES: dict[str, str] = {
    "clipping": "defenses.clipping:Clipping",
    "dp_sgd": "defenses.dp_sgd:DpSgd",
    "frozen_pe": "defenses.frozen_pe:FrozenPE",
    "gaussian_noise": "defenses.gaussian_noise:GaussianNoise",
    "label_disguise": "defenses.label_disguise:LabelDisguise",
    "laplace_noise": "defenses.laplace_noise:LaplaceNoise",
    "local_dp": "defenses.local_dp:LocalDp",
    "mjp": "defenses.mjp:Mjp",
    "quantization": "defenses.quantization:Quantization",
    "random_k": "defenses.random_k:RandomK",
    "secure_aggregation": "defenses.secure_aggregation:SecureAggregation",
    "sinusoidal_pe": "defenses.sinusoidal_pe:SinusoidalPE",
    "soteria": "defenses.soteria:Soteria",
    "top_k": "defenses.top_k:TopK",
    "withheld": "defenses.withheld:Withheld",
}


def create_defense(name: str, **params: Any) -> Defense:
    """The defense called ``name``, its parameters checked."""
    defense = build("defense", DEFENSES, name, params)
    if not isinstance(defense, Defense):
        raise SpecError(f"the defense '{name}' must derive from fedsim.core.defense.Defense.")
    return defense


def create_defenses(components: list[Component]) -> list[Defense]:
    """A client's defenses, in the order in which they act."""
    names = [component.name for component in components]
    for name in names:
        if names.count(name) > 1:
            raise SpecError(f"the defense '{name}' is listed twice.")
    return [create_defense(component.name, **component.params) for component in components]

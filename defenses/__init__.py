"""The defenses: one file each. They import only `fedsim.core`.

A defense is a dataclass of its parameters that overrides the hooks of `fedsim.core.defense.Defense`
it needs. To add one, write the file and add its line here, or name it in a spec by its import path
``package.module:Class``.
"""

from __future__ import annotations

from typing import Any

from fedsim.core.defense import Defense
from fedsim.core.registry import build_as, refuse_twice
from fedsim.core.spec import Component

if __name__ != "fedsim.defenses":
    raise ModuleNotFoundError("import fedsim.defenses: it is a part of fedsim.", name=__name__)

__all__ = ["DEFENSES", "Defense", "create_defense", "create_defenses"]

DEFENSES: dict[str, str] = {
    "censor": "fedsim.defenses.censor:Censor",
    "clipping": "fedsim.defenses.clipping:Clipping",
    "dp_sgd": "fedsim.defenses.dp_sgd:DpSgd",
    "dropout": "fedsim.defenses.dropout:Dropout",
    "frozen_pe": "fedsim.defenses.frozen_pe:FrozenPE",
    "gaussian_noise": "fedsim.defenses.gaussian_noise:GaussianNoise",
    "label_disguise": "fedsim.defenses.label_disguise:LabelDisguise",
    "laplace_noise": "fedsim.defenses.laplace_noise:LaplaceNoise",
    "local_dp": "fedsim.defenses.local_dp:LocalDp",
    "mjp": "fedsim.defenses.mjp:Mjp",
    "oasis": "fedsim.defenses.oasis:Oasis",
    "percentile_privacy": "fedsim.defenses.percentile_privacy:PercentilePrivacy",
    "precode": "fedsim.defenses.precode:Precode",
    "quantization": "fedsim.defenses.quantization:Quantization",
    "random_k": "fedsim.defenses.random_k:RandomK",
    "secure_aggregation": "fedsim.defenses.secure_aggregation:SecureAggregation",
    "sinusoidal_pe": "fedsim.defenses.sinusoidal_pe:SinusoidalPE",
    "soteria": "fedsim.defenses.soteria:Soteria",
    "svt_privacy": "fedsim.defenses.svt_privacy:SvtPrivacy",
    "top_k": "fedsim.defenses.top_k:TopK",
    "withheld": "fedsim.defenses.withheld:Withheld",
}


def create_defense(name: str, **params: Any) -> Defense:
    """The defense called ``name``, its parameters checked."""
    return build_as("defense", DEFENSES, Defense, name, params)


def create_defenses(components: list[Component]) -> list[Defense]:
    """A client's defenses, in the order in which they act."""
    refuse_twice("defense", [component.name for component in components])
    return [create_defense(component.name, **component.params) for component in components]

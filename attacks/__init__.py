"""The attacks: one file each, beside the pieces they share. They import only `fedsim.core`.

An attack is a dataclass of its parameters that says what it needs and turns a View into a
Reconstruction. To add one, write the file and add its line here, or name it in a spec by its import
path ``package.module:Class``.
"""

from __future__ import annotations

from typing import Any

from fedsim.core.attack import Attack, complete
from fedsim.core.errors import SpecError
from fedsim.core.knowledge import FIELDS
from fedsim.core.registry import build, code_digest
from fedsim.core.seal import sealed

if __name__ != "fedsim.attacks":
    raise ModuleNotFoundError("import fedsim.attacks: it is a part of fedsim.", name=__name__)

__all__ = ["ATTACKS", "Attack", "code_of", "create_attack"]

ATTACKS: dict[str, str] = {
    "april": "fedsim.attacks.april:April",
    "april_closed": "fedsim.attacks.april_closed:AprilClosed",
    "deep_inversion": "fedsim.attacks.deep_inversion:DeepInversion",
    "dlg": "fedsim.attacks.dlg:Dlg",
    "features": "fedsim.attacks.features:Features",
    "gias": "fedsim.attacks.gias:Gias",
    "giml": "fedsim.attacks.giml:Giml",
    "grad_inversion": "fedsim.attacks.grad_inversion:GradInversion",
    "gradvit": "fedsim.attacks.gradvit:GradVit",
    "idlg": "fedsim.attacks.idlg:IDlg",
    "imprint": "fedsim.attacks.imprint:Imprint",
    "imprint_layer": "fedsim.attacks.imprint_layer:ImprintLayer",
    "inverter": "fedsim.attacks.inverter:Inverter",
    "inverting_gradients": "fedsim.attacks.inverting_gradients:InvertingGradients",
    "joint": "fedsim.attacks.joint:Joint",
    "membership": "fedsim.attacks.membership:Membership",
    "patch_solve": "fedsim.attacks.patch_solve:PatchSolve",
    "prior_only": "fedsim.attacks.prior_only:PriorOnly",
    "rgap": "fedsim.attacks.rgap:RGap",
    "row_space": "fedsim.attacks.row_space:RowSpace",
    "spear": "fedsim.attacks.spear:Spear",
    "tag": "fedsim.attacks.tag:TagAttack",
}


def create_attack(name: str, **params: Any) -> Attack:
    """The attack called ``name``, its parameters checked."""
    attack: Attack = build("attack", ATTACKS, name, params)
    with sealed():  # what it says of itself may be its author's code
        if not callable(getattr(attack, "reconstruct", None)):
            raise SpecError(
                f"the attack '{name}' has no method reconstruct(view, *, device, progress)."
            )
        complete(type(attack))
        unknown = set(getattr(attack, "needs", ())) - set(FIELDS)
        if unknown or not hasattr(attack, "needs"):
            raise SpecError(f"the attack '{name}' must say what it needs, of: {', '.join(FIELDS)}.")
    return attack


def code_of(name: str) -> str:
    """A hash of the source of the attack called ``name``; nothing for one of ours, whose version is
    told with every run."""
    return code_digest(ATTACKS, name)

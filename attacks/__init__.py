"""The attacks: one file each, beside the pieces they share. They import only `fedsim.core`.

An attack is a dataclass of its parameters that says what it needs and turns a View into a
Reconstruction. To add one, write the file and add its line here, or name it in a spec by its
import path ``package.module:Class``.
"""

from __future__ import annotations

from typing import Any

from fedsim.core.attack import Attack
from fedsim.core.errors import SpecError
from fedsim.core.knowledge import FIELDS
from fedsim.core.registry import build

ATTACKS: dict[str, str] = {
    "april": "attacks.april:April",
    "april_closed": "attacks.april_closed:AprilClosed",
    "deep_inversion": "attacks.deep_inversion:DeepInversion",
    "dlg": "attacks.dlg:Dlg",
    "gias": "attacks.gias:Gias",
    "giml": "attacks.giml:Giml",
    "grad_inversion": "attacks.grad_inversion:GradInversion",
    "gradvit": "attacks.gradvit:GradVit",
    "idlg": "attacks.idlg:IDlg",
    "inverting_gradients": "attacks.inverting_gradients:InvertingGradients",
    "joint": "attacks.joint:Joint",
    "patch_solve": "attacks.patch_solve:PatchSolve",
    "prior_only": "attacks.prior_only:PriorOnly",
    "rgap": "attacks.rgap:RGap",
    "row_space": "attacks.row_space:RowSpace",
    "tag": "attacks.tag:TagAttack",
}


def create_attack(name: str, **params: Any) -> Attack:
    """The attack called ``name``, its parameters checked."""
    attack: Attack = build("attack", ATTACKS, name, params)
    if not callable(getattr(attack, "reconstruct", None)):
        raise SpecError(
            f"the attack '{name}' has no method reconstruct(view, *, device, progress)."
        )
    unknown = set(getattr(attack, "needs", ())) - set(FIELDS)
    if unknown or not hasattr(attack, "needs"):
        raise SpecError(f"the attack '{name}' must say what it needs, of: {', '.join(FIELDS)}.")
    return attack

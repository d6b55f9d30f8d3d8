"""Closed forms: the frame that solves for a batch of one, and the linear solvers it stands on."""

from fedsim.attacks.closed.frame import (
    ClosedForm,
    Hidden,
    Solved,
    fold_patches,
    refuse_frozen,
    uploaded,
)
from fedsim.attacks.closed.solvers import RidgeSolution, ridge_solve

__all__ = [
    "ClosedForm",
    "Hidden",
    "RidgeSolution",
    "Solved",
    "fold_patches",
    "refuse_frozen",
    "ridge_solve",
    "uploaded",
]

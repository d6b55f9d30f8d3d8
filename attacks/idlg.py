"""iDLG (Zhao et al. 2020): DLG with the labels read from the head's gradient first."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.attacks.dlg import Dlg
from fedsim.attacks.matching import LabelRule


@dataclass(frozen=True, kw_only=True)
class IDlg(Dlg):
    """The authors read labels by the sum rule, for one image; ``auto`` also counts batches."""

    labels: LabelRule = "auto"

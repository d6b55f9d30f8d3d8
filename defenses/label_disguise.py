"""Label disguise (Jeon et al. 2021, Appendix F): batches with fewer labels than pictures.

Labels that repeat leave open which picture has which, so that a generator conditioned on labels
helps less. Nothing is added to the data: the client chooses what it draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from fedsim.core.defense import Defense


@dataclass(frozen=True)
class LabelDisguise(Defense):
    """``share``: distinct labels of a batch, as a share of its pictures."""

    share: Annotated[float, Field(gt=0, le=1)] = 0.5

    def choose(self, labels: np.ndarray, size: int, coin: np.random.Generator) -> np.ndarray:
        wanted = max(1, round(self.share * size))
        classes = coin.permutation(np.unique(labels))
        chosen = np.flatnonzero(np.isin(labels, classes[:wanted]))
        while len(chosen) < size and wanted < len(classes):  # too few pictures of these labels
            wanted += 1
            chosen = np.flatnonzero(np.isin(labels, classes[:wanted]))
        return coin.choice(chosen, size, replace=len(chosen) < size)

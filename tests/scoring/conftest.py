"""Scores made to order."""

from __future__ import annotations

import pandas as pd

from fedsim.core.attack import BASELINE
from fedsim.scoring.scores import columns


def table(psnr: list[float], guess: list[float], ssim: float = 0.2, canary: float = 0.0):
    rows = []
    for attack, values in (("mine", psnr), (BASELINE, guess)):
        for client, value in enumerate(values):
            own = ssim if attack == "mine" else 0.2
            rows.append(
                {
                    **dict.fromkeys(columns()),
                    **{"round": 1, "client": client, "attack": attack, "trial": 0, "image": 0},
                    **{"psnr": value, "ssim": own, "canary": canary, "seconds": 1.0},
                }
            )
    return pd.DataFrame(rows, columns=columns())

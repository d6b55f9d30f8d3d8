"""How many pictures come back as any of the copies that OASIS shows of them, beside upright ones:

    python -m experiments.active.turned CELL [CELL ...]

A cell is a run of `fedsim bench experiments/active/oasis.yaml -o DIR`, under DIR/cells. Scores are
those of the pictures themselves: one that comes back on its side is no hit there, and is a leak.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from fedsim.core.metrics import decibel
from fedsim.core.run import Run
from fedsim.core.vault import Vault
from fedsim.defenses.applied import declared
from fedsim.defenses.oasis import Oasis, joined
from fedsim.scoring.recovery import RECOVERED_DB


def back(pictures: Tensor, copies: Tensor, found: Tensor) -> Tensor:
    """Which of the pictures (B, 3, H, W) are among those found, as any of their copies."""
    if not len(found):
        return torch.zeros(len(pictures), dtype=torch.bool)
    shown = copies.view(-1, *pictures.shape)  # kind by kind
    errors = [
        (one[:, None] - found[None]).square().flatten(2).mean(2).amin(1) for one in shown
    ]  # fmt: skip
    return decibel(torch.stack(errors).amin(0)) >= RECOVERED_DB


def counted(run: Run) -> tuple[int, int, int]:
    """Pictures, those that came back upright, and those that came back as any copy."""
    attack = run.spec.attacks[0].name
    defense = next((d for d in declared(run.spec.defenses) if isinstance(d, Oasis)), None)
    pictures = upright = any_way = 0
    for round_ in run.spec.audited_rounds:
        for client in run.spec.cohort(round_):
            truth = Vault(run.vault).read(round_, client).images
            found = run.images(attack, round_, client)
            copies = truth if defense is None else joined(truth, defense.transforms)
            pictures += len(truth)
            upright += int(back(truth, truth, found).sum())
            any_way += int(back(truth, copies, found).sum())
    return pictures, upright, any_way


def main(cells: list[str]) -> None:
    for cell in cells:
        pictures, upright, any_way = counted(Run.open(cell))
        print(f"{cell}: of {pictures} pictures {upright} upright, {any_way} as any copy")


if __name__ == "__main__":
    main(sys.argv[1:])

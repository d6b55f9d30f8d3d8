"""Candidates: pictures of which an attack is to tell whether they were in a batch.

Some of them are the client's own. So the list is handed only to an attack that names it among its
``needs``, and what such an attack hands back is a number for each candidate and nothing else: a
picture, a label or a feature that it claimed could be one from the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fedsim.core.errors import AttackError

if TYPE_CHECKING:
    from fedsim.core.attack import Reconstruction

CANDIDATES = "candidates"
SCORES = ("score", "label_only")  # the columns of what an attack says of each candidate


@dataclass(frozen=True)
class Candidates:
    """Pictures (N, 3, H, W) in [0, 1] with their labels (N,), members of the batch and others, in
    an order that tells nothing."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def shown_to(granted: frozenset[str], candidates: Candidates | None) -> frozenset[str]:
    """What an attack may read of what is ``granted``: the list only where it was handed one."""
    return granted if candidates is not None else granted - {CANDIDATES}


def refuse_other_claims(result: Reconstruction, candidates: Candidates | None) -> None:
    """Raise where an attack that was handed a list claims what it may have from there, or says
    something of another list; and where one that was not says something of a list."""
    said = result.membership
    if candidates is None:
        if said is not None:
            raise AttackError(
                f"the attack told members from others and was handed no list; an attack that does "
                f"names '{CANDIDATES}' in its needs."
            )
        return
    claims = {
        "images": len(result.images),
        "labels": 0 if result.labels is None else result.labels.numel(),
        "features": 0 if result.features is None else len(result.features),
        "a film": len(result.film),
    }
    claimed = [what for what, count in claims.items() if count]
    if claimed:
        raise AttackError(
            f"the attack returned {' and '.join(claimed)}, and was handed candidates, of which "
            f"some are the client's own pictures: it may claim nothing but who was in the batch."
        )
    if said is None or len(said) != len(candidates):
        count = 0 if said is None else len(said)
        raise AttackError(
            f"the attack told {count} candidates of {len(candidates)} from others; it must say "
            f"something of each."
        )

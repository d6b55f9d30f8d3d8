"""SameModel: did everyone in the cohort receive the same weights?

A server that sends a head of zeros to all but one reads that one through secure aggregation. Each
of the models may look harmless by itself; that they differ is what gives it away. It takes clients
who can tell each other, past the server, what they received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedsim.core.guard import Finding, Guard, Scene
from fedsim.core.learning import batchnorm_buffers, digest


@dataclass(frozen=True, kw_only=True)
class SameModel(Guard):
    """The score is the number of others who received something else; one is too many."""

    def inspect(self, scene: Scene) -> Finding:
        if scene.notices is None:
            words = "clients cannot talk to each other here: nothing to compare with"
            return Finding("same_model", 0.0, 0.0, words)
        others = {who: said for who, said in scene.notices.items() if who != scene.client}
        own = notice_of(scene)
        apart = sorted(who for who, said in others.items() if said != own)
        if not others:
            words = "no other client of the cohort said what it received"
        elif not apart:
            words = f"others of the cohort received the same ({len(others)} of {len(others)})"
        else:
            named = ", ".join(str(who) for who in apart[:5]) + (", ..." if apart[5:] else "")
            words = f"{len(apart)} of {len(others)} others received something else: {named}"
        return Finding("same_model", float(len(apart)), 0.0, words)


def notice_of(scene: Scene) -> str:
    """What this client tells the others. BatchNorm statistics that every client keeps for itself
    are no part of it: they were not received."""
    received = scene.received
    if scene.protocol.batchnorm == "local":
        own = batchnorm_buffers(scene.model)
        received = {name: tensor for name, tensor in received.items() if name not in own}
    return digest_of(received)


def digest_of(state: Mapping[str, Tensor]) -> str:
    """A hash of the weights, the same for all who received the same."""
    return digest(state)

"""SameModel: did everyone in the cohort receive the same weights?

A server that sends a head of zeros to all but one reads that one through secure aggregation. Each
of the models may look harmless by itself; that they differ is what gives it away. It takes clients
who can tell each other, past the server, what they received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fedsim.core.guard import Finding, Guard, Scene
from fedsim.core.learning import Protocol, batchnorm_buffers, digest


@dataclass(frozen=True, kw_only=True)
class SameModel(Guard):
    """The score is the number of others who received something else; one is too many. Who says
    nothing may have dropped out; where more than half do, they count as well."""

    def inspect(self, scene: Scene) -> Finding:
        if scene.notices is None:
            words = "clients cannot talk to each other here: nothing to compare with"
            return Finding("same_model", 0.0, 0.0, words)
        others = {who: said for who, said in scene.notices.items() if who != scene.client}
        own = notice_of(scene)
        absent = [who for who, said in others.items() if not said]
        heard = len(others) - len(absent)
        apart = sorted(who for who, said in others.items() if said not in (own, ""))
        if not others:
            words = "no other client of the cohort said what it received"
        elif not apart and len(absent) > heard:
            words = f"{len(absent)} of {len(others)} others do not say what they received"
            return Finding("same_model", float(len(absent)), 0.0, words)
        elif not apart:
            words = f"others of the cohort received the same ({heard} of {len(others)})"
        else:
            named = ", ".join(str(who) for who in apart[:5]) + (", ..." if apart[5:] else "")
            words = f"{len(apart)} of {len(others)} others received something else: {named}"
        return Finding("same_model", float(len(apart)), 0.0, words)


def notice_of(scene: Scene) -> str:
    """What this client tells the others. BatchNorm statistics that every client keeps for itself
    are no part of it: they were not received."""
    return digest_of(scene.received, scene.model, scene.protocol)


def digest_of(state: Mapping[str, Tensor], model: nn.Module, protocol: Protocol) -> str:
    """A hash of the weights, the same for all who received the same."""
    own = batchnorm_buffers(model) if protocol.batchnorm == "local" else {}
    return digest({name: tensor for name, tensor in state.items() if name not in own})

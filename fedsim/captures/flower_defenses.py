"""Flower's own defenses: which of them a server can see, and who sees what behind each.

A `DifferentialPrivacy...` wrapper stands around the strategy, so the server knows of it. What it
says about the update that arrives is another matter: clipping on the server's side, and the noise
of all four wrappers, come after the server has read the update. Of mods of clients a server sees
the norm that it sent them (`clipping_norm` in the message), and nothing of the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from flwr.serverapp.strategy.strategy import Strategy

KEY_CLIPPING_NORM = "clipping_norm"  # by which a wrapper tells clients, in the message's config

_CLIENT_SIDE = {
    DifferentialPrivacyClientSideFixedClipping: "fixedclipping_mod",
    DifferentialPrivacyClientSideAdaptiveClipping: "adaptiveclipping_mod",
}
_SERVER_SIDE = (
    DifferentialPrivacyServerSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
)
_ADAPTIVE = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
)


@dataclass(frozen=True)
class Recognised:
    """What a strategy shows of defenses: the norm to which updates are clipped before they are
    captured, and for a reader who sees what."""

    norm: float | None = None
    sentences: tuple[str, ...] = ()


def recognised(strategy: Strategy, around: Sequence[Strategy] = ()) -> Recognised:
    """The defenses of Flower's within a captured ``strategy``, and of what stands ``around`` it
    (`wrappers_around`).

    The two differ where the server clips: what is around a captured strategy has clipped before
    that sees a reply, what is inside clips afterwards.
    """
    norms, sentences = list[float](), list[str]()
    for outside, one in [*((True, one) for one in around), *((False, s) for s in within(strategy))]:
        if (mod := _mod_of(one)) is not None:
            sentences.append(_by_clients(one, mod))
            norms.append(_norm(one))
        elif isinstance(one, _SERVER_SIDE) and outside:
            sentences.append(_by_server_before(one))
            norms.append(_norm(one))
        elif isinstance(one, _SERVER_SIDE):
            sentences.append(_by_server(one))
    return Recognised(min(norms, default=None), tuple(sentences))


def within(strategy: Strategy) -> Iterator[Strategy]:
    """A strategy and those it wraps, from the outside to the inside."""
    seen, waiting = set[int](), [strategy]
    while waiting:
        one = waiting.pop(0)
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [
                value
                for value in getattr(one, "__dict__", {}).values()
                if isinstance(value, Strategy)
            ]


def wrappers_around(strategy: Strategy) -> list[Strategy]:
    """The strategies of Flower's that are calling this one, from the outside to the inside. A
    wrapped strategy does not know its wrapper, but while it is asked for a round's messages that
    stands on the stack."""
    found: list[Strategy] = []
    frame = inspect.currentframe()
    while frame is not None:
        # Looked into are methods alone: what is looked into keeps its variables as they are now.
        method = frame.f_code.co_varnames[:1] == ("self",)
        caller = frame.f_locals.get("self") if method else None
        if (
            isinstance(caller, Strategy)
            and caller is not strategy
            and caller not in found
            and any(one is strategy for one in within(caller))
        ):
            found.insert(0, caller)
        frame = frame.f_back
    return found


def clipping(norms: Mapping[int, float]) -> dict[str, Any]:
    """The defense that a spec declares, with the norm of each round (counted from 1) in which it is
    known: an adaptive wrapper changes it. In rounds between, that of the round before holds."""
    last, schedule = norms[min(norms)], []
    for round_ in range(1, max(norms) + 1):
        last = norms.get(round_, last)
        schedule.append(last)
    changes = {"norms": schedule} if len(set(schedule)) > 1 else {}
    return {"name": "clipping", "norm": schedule[0], "everything": True, **changes}


def contradiction(size: float, norm: float) -> str | None:
    """What an update of this l2 norm says against clients having clipped it to ``norm``."""
    if size <= norm * (1 + 1e-3):  # weights travel in float32, and clipped numbers are rounded
        return None
    return (
        f"an update has the norm {size:.3g}, and clients were told to clip to {norm:.3g}: its "
        f"client runs without the mod, so clipping is not what the server sees."
    )


def _mod_of(strategy: Strategy) -> str | None:
    return next((mod for kind, mod in _CLIENT_SIDE.items() if isinstance(strategy, kind)), None)


def _norm(strategy: Any) -> float:
    return float(strategy.clipping_norm)


def _named(strategy: Any) -> str:
    norm = "first norm" if isinstance(strategy, _ADAPTIVE) else "norm"
    return (
        f"{type(strategy).__name__} ({norm} {_norm(strategy):.4g}, noise multiplier "
        f"{strategy.noise_multiplier:.4g})"
    )


def _by_clients(strategy: Strategy, mod: str) -> str:
    return (
        f"{_named(strategy)}: clients clip by {mod}, and the server reads each update as it was "
        f"clipped, without noise; noise is added to the mean afterwards, and protects from those "
        f"who see the model, not from the server. That clients have the mod is not to be seen in "
        f"the wrapper."
    )


def _by_server(strategy: Strategy) -> str:
    return (
        f"{_named(strategy)}: the server clips and adds noise after it has the updates, so they "
        f"arrive as clients made them and are attacked as such; the wrapper protects from those "
        f"who see the model, not from the server."
    )


def _by_server_before(strategy: Strategy) -> str:
    return (
        f"{_named(strategy)} stands around the captured strategy: what is captured was clipped by "
        f"the server, which had it whole; capture the wrapper to see what arrived. Noise is added "
        f"to the mean afterwards, and protects from those who see the model, not from the server."
    )

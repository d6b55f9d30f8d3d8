"""Binding: which of a witness's passes are the truth behind which observation.

A client does not know the round it is in, and the server does not know what a client sees; both
know Flower's node and the time. On one machine a pass belongs to the message between whose sending
and whose reply it lies. Between machines clocks differ, so passes are told apart by their
witnesses, the k-th is that of the k-th message, and all must lie within their messages once the
clocks are set right by one difference. Where more than one reading is possible there is no truth,
and an event that says so: a wrong one would be worse.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.captures.log import Messages
from fedsim.captures.passes import NO_PASS, Pass, as_pictures
from fedsim.core.vault import Truth

SLACK = 0.05  # seconds, between the clocks of machines; that of one machine is the same


@dataclass(frozen=True)
class Asked:
    """A message to a node that was answered, and the observation that came of it, if one did."""

    round: int
    client: int
    node: int
    sent: float
    received: float
    kept: bool


@dataclass(frozen=True)
class Bound:
    """The passes of one message, in order."""

    asked: Asked
    passes: tuple[Pass, ...]


def asked_in(rounds: Iterable[Messages]) -> list[Asked]:
    return [
        Asked(m.round, r.client, r.node, r.sent, r.received, r.kept)
        for m in rounds
        for r in m.replies
        if r.received is not None
    ]


def bind(
    asked: Sequence[Asked], passes: Sequence[Pass], host: str
) -> tuple[list[Bound], list[tuple[Asked, str]]]:
    """The passes of every observation, and for each that has none though its client had a witness,
    why."""
    bound: list[Bound] = []
    unbound: list[tuple[Asked, str]] = []
    for node in dict.fromkeys(one.node for one in asked):
        messages = sorted((a for a in asked if a.node == node), key=lambda a: a.sent)
        own = sorted((p for p in passes if p.about.node_id == node), key=lambda p: p.about.began)
        if not own:
            continue
        near = [p for p in own if p.about.host == host]
        here = len(near) == len(own)
        offset, slack = (0.0, 0.0) if here else (_offset(messages, own), SLACK)
        if offset is None:
            words = "its witness and the server disagree about when it trained"
            unbound += [(one, words) for one in messages if one.kept]
            continue
        for one in (one for one in messages if one.kept):
            within = tuple(p for p in own if _lies_in(p, one, offset, slack))
            within = tuple(p for p in within if p.about.learned)  # others measured, and no more
            within = tuple(p for p in within if p.about.number != NO_PASS) or within
            why = _doubt(within)
            if why is None:
                bound.append(Bound(one, within))
            else:
                unbound.append((one, why))
    return bound, unbound


def _lies_in(one: Pass, asked: Asked, offset: float, slack: float) -> bool:
    began, ended = one.about.began - offset, one.about.ended - offset
    return asked.sent - slack <= began and ended <= asked.received + slack


def _doubt(within: tuple[Pass, ...]) -> str | None:
    """Why these passes are not certainly what a client learned from, all of it and nothing else."""
    if not within:
        return "its witness saw nothing while it trained"
    lost = [p.about.lost for p in within if p.about.lost]
    if lost:
        return f"its witness lost what it saw: {lost[0]}"
    if len({p.about.loader for p in within}) > 1:
        return "its witnesses saw several loaders, and which it learned from is not known"
    overlap = any(a.about.ended > b.about.began for a, b in _pairs(within))
    return "it went through its loader several times at once" if overlap else None


def _pairs(passes: tuple[Pass, ...]) -> list[tuple[Pass, Pass]]:
    return list(itertools.pairwise(passes))


def _offset(messages: Sequence[Asked], passes: Sequence[Pass]) -> float | None:
    """How far the clock of a client is before the server's; None where no one difference explains
    the times, or the k-th witness is not that of the k-th message."""
    groups: dict[str, list[Pass]] = {}
    for one in (one for one in passes if one.about.number != NO_PASS):
        groups.setdefault(one.about.source, []).append(one)
    if len(groups) != len(messages):
        return None
    least, most = float("-inf"), float("inf")
    for asked, group in zip(messages, groups.values(), strict=True):
        most = min(most, min(p.about.began for p in group) - asked.sent)
        least = max(least, max(p.about.ended for p in group) - asked.received)
    return (least + most) / 2 if least <= most + SLACK else None


class Album:
    """The pictures that the witnesses of a run kept, by witness and number."""

    def __init__(self, passes: Iterable[Pass], mean: Sequence[float], std: Sequence[float]):
        self._pictures: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        for one in passes:
            with contextlib.suppress(ValueError, RuntimeError):  # not of this run: truths lack them
                self._pictures |= _pictures_in(one, mean, std)

    def truth(
        self, bound: Bound, update: str, *, drop_last: bool = False, accumulate: int = 1
    ) -> Truth | None:
        """The truth of an observation; None where a picture of it is missing, or they are not of
        one shape. ``drop_last``: of a pass that was cut short, the last batch was fetched and not
        used. ``accumulate``: so many of the loader's batches are behind one step."""
        batches = []
        for one in bound.passes:
            rows = one.about.rows
            if drop_last and not one.about.exhausted:
                rows = rows[:-1]
            for first in range(0, len(rows), accumulate):
                step = itertools.chain(*rows[first : first + accumulate])
                batches.append([(one.about.source, row) for row in step])
        keys = list(dict.fromkeys(key for batch in batches for key in batch))
        if not keys or any(key not in self._pictures for key in keys):
            return None
        at = {key: row for row, key in enumerate(keys)}
        pictures = [self._pictures[key][0] for key in keys]
        named = [self._pictures[key][1] for key in keys]
        if len({p.shape for p in pictures}) > 1 or len({(n.shape, n.dtype) for n in named}) > 1:
            return None
        labels = torch.stack(named)
        mixed = labels.ndim == 2
        return Truth(
            images=torch.stack(pictures),
            labels=labels.argmax(1) if mixed else labels.long(),
            batches=[[at[key] for key in batch] for batch in batches],
            defense_seed=0,
            trail=[],
            update=update,
            mixtures=labels.float() if mixed else None,
        )


def _pictures_in(
    one: Pass, mean: Sequence[float], std: Sequence[float]
) -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
    """The pictures of one pass with their labels; an error where it says what it does not hold."""
    stored = as_pictures(one.stored, mean, std) if len(one.stored) else one.stored
    loose = as_pictures(one.loose, mean, std) if len(one.loose) else one.loose
    rows = [*one.about.stored, *one.about.loose]
    kept = zip(rows, [*stored, *loose], one.labels, strict=True)
    return {(one.about.source, row): (picture, label) for row, picture, label in kept}

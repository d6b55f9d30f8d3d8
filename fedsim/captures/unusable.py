"""Unusable: captured updates with which nothing can be done, and why, in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from fedsim.captures.log import Messages, Reply
from fedsim.core.errors import DamagedError
from fedsim.core.files import read_tensors
from fedsim.core.run import Run, observation_path, weights_path

MOST_EXAMPLES = 1_000_000  # that a client may say it learned from in a round
LIKE = 0.1  # the cosine of weights and of what was trained from them is near 1


def leave_out(run: Run, rounds: Iterable[Messages]) -> None:
    """Have the log say of updates with which nothing can be done that they are not kept."""
    for messages in rounds:
        sent: dict[str, Tensor] = {}  # of this round, read once
        for reply in messages.replies:
            why = _why(run, messages, reply, sent) if reply.kept else None
            if why is not None:
                kind, words = why
                reply.kept, reply.why = False, words
                run.note(kind, words, round=messages.round, client=reply.client)


def _why(
    run: Run, messages: Messages, reply: Reply, sent: dict[str, Tensor]
) -> tuple[str, str] | None:
    """Why an update is left out, as an event of this kind; ``sent`` is filled where it is empty."""
    whose = f"the update of client {reply.client} in round {messages.round}"
    if (reply.examples or 0) > MOST_EXAMPLES:
        words = f"{whose} is left out: it claims {reply.examples} examples, which nobody simulates"
        return "update_rejected", words
    try:
        held, _ = read_tensors(observation_path(run.observations, messages.round, reply.client))
        sent.update({} if sent else read_tensors(weights_path(run.observations, messages.round))[0])
    except FileNotFoundError:
        return "update_lost", f"{whose} is left out: its files are not there any more"
    except DamagedError as error:
        return "update_lost", f"{whose} is left out: {error}"
    kinds = {name: name.partition("/") for name in held}
    updates = {own: held[name] for name, (kind, _, own) in kinds.items() if kind == "update"}
    if not any(bool((tensor != 0).any()) for tensor in updates.values()):
        return "nothing_trained", f"{whose} is left out: it sent back what it was sent"
    if _is_no_weights({n: t for n, t in updates.items() if n in sent and t.ndim > 1}, sent):
        words = (
            f"{whose} is left out: what came back has nothing of the weights that were sent, so it "
            f"may be a difference or a gradient; have the app's clients upload weights"
        )
        return "update_rejected", words
    return None


def _is_no_weights(updates: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> bool:
    """Whether what came back is smaller than what was sent and does not point where that does: what
    was trained does, and what exploded or was noised is larger."""
    size = other = inner = 0.0
    for name, update in updates.items():
        before = sent[name].double()
        after = before + update.double()
        size += float(before.square().sum())
        other += float(after.square().sum())
        inner += float((before * after).sum())
    return 0 < other < size and inner < LIKE * math.sqrt(size * other)

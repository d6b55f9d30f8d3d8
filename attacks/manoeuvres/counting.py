"""Counting: how many pictures answered a fished head, and what the server says of it.

A class's count is read off the head's bias, or off the layer before the head where that was not
uploaded; a gate's off how much came through it. Nothing is claimed where steps or batches do not
all count alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.attacks.manoeuvres.gates import Gate, Passed, read_gate
from fedsim.attacks.manoeuvres.reading import (
    HeadReading,
    answer_weights,
    answers,
    count_others,
    count_unpredicted,
    sent_back,
)
from fedsim.core.anatomy import head_names
from fedsim.core.manoeuvre import Sighting
from fedsim.core.spec import Upload

ONE = 1.005  # up to here a count is of one picture: another has 6 parts in 10,000 beside it


def count_class(
    seen: Sighting, model: nn.Module, head: HeadReading | None, target: int
) -> tuple[float | None, str]:
    """How many pictures of the target answered, None where that is not known, and the words."""
    if head is None:
        width = model.get_parameter(head_names(model)[0]).shape[1]
        count = sent_back(seen, model, row_of(seen.about, width))
        how = "by the layer before the head, which was not uploaded"
        if count is None:
            return None, "how many answered is not known: the head was not uploaded"
    else:
        count, how = count_unpredicted(seen, head, target), "by the head's bias"
        if count is None:
            return None, "how many answered is not known: the update's size is not"
    fewest, most = answers(count, answer_weights(seen))
    if fewest != most:
        many = f"{fewest} to {most}" if fewest < most else "not known how many"
        words = f"{many} pictures of class {target} answered, {how}"
        return None, f"{words}: steps and batches do not all count alike"
    answered, steps = fewest, seen.public.local_steps or 1
    count = float(answered)
    if answered > 1 and steps > 1 and seen.update.kind is Upload.DELTA:
        words = f"class {target} answered {answered} times in {steps} steps: several pictures"
        return count, f"{words}, or fewer that were taken again, {how}"
    if answered == 1:
        return count, f"one picture of class {target} answered, {how}"
    return count, f"{answered} pictures of class {target} answered, mixed, {how}"


def count_gate(seen: Sighting, gate: Gate, head: HeadReading | None) -> tuple[float | None, str]:
    """How many pictures passed a gate, None where that is not known, and the words."""
    if head is None:
        return None, "how many passed the gate is not known: the head was not uploaded"
    if not head.known:
        return None, "how many passed the gate is not known: the update's size is not"
    if others := count_others(seen, head, int(seen.about["target"])):
        words = f"mixed: {others} pictures of other classes are beyond a gate"
        return float(min(others + 1, seen.pictures)), words
    passed = passed_through(seen, gate, head)
    if passed.count is None or passed.count <= 0:
        return None, "how many passed the gate is not known: too little came through"
    share = f"{passed.total:.2g} of a picture came through"
    if passed.count <= ONE:
        return passed.count, f"one picture passed the gate (count {passed.count:.3f}; {share})"
    return passed.count, f"mixed: {passed.count:.1f} pictures passed the gate ({share})"


def row_of(about: Mapping[str, Any], width: int) -> Tensor:
    """The target's row, (D,), which every client of a cohort is read by, whatever it received."""
    direction = torch.randn(width, generator=torch.Generator().manual_seed(about["seed"]))
    return about["row"] * direction / direction.norm()


def gate_of(seen: Sighting) -> Gate | None:
    """The gate that was sent, if one was."""
    gate = seen.about.get("gate")
    return None if gate is None else Gate(**gate)


def passed_through(seen: Sighting, gate: Gate, head: HeadReading) -> Passed:
    """What came through a gate."""
    target = int(seen.about["target"])
    return read_gate(gate, head.weight, head.bias, target, seen.pictures)

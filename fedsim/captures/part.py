"""Part: which of a model's parameters an app's clients train, by what came back and moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fedsim.captures.inference import Inferred, rank_of
from fedsim.captures.log import Messages
from fedsim.captures.names import Names
from fedsim.core.anatomy import head_names
from fedsim.core.errors import ModelError, SpecError
from fedsim.core.files import read_tensors
from fedsim.core.lora import wanted
from fedsim.core.run import Run, observation_path
from fedsim.core.spec import TrainSpec
from fedsim.core.text import listed
from fedsim.core.trainable import choose, named_part


@dataclass(frozen=True)
class Seen:
    """What all the updates of a capture have in common."""

    moved: frozenset[str]  # what came back as another than it was sent
    statistics: bool  # whether BatchNorm's came back
    rank: int | None  # of the output layer's updates, where they have the same


def surveyed(run: Run, model: nn.Module, rounds: list[Messages], names: Names) -> Seen:
    weight = head_weight(model)
    moved, statistics, ranks = set[str](), False, set[int | None]()
    for messages in rounds:
        for reply in messages.replies:
            if not reply.kept:
                continue
            path = observation_path(run.observations, messages.round, reply.client)
            held = {names.stored(n): t for n, t in read_tensors(path)[0].items()}
            updates = {name: t for (kind, name), t in held.items() if kind == "update"}
            moved |= {n for n, t in updates.items() if n not in moved and bool((t != 0).any())}
            statistics |= any(name in names.statistics for _, name in held)
            if len(ranks) < 2:
                ranks.add(rank_of(updates[weight]) if weight in updates else None)
    return Seen(frozenset(moved), statistics, ranks.pop() if len(ranks) == 1 else None)


def head_weight(model: nn.Module) -> str | None:
    try:
        return head_names(model)[0]
    except ModelError:
        return None


def declared_part(
    run: Run, content: Mapping[str, Any], model: nn.Module, names: Names, seen: Seen
) -> Names:
    """The names with what is declared to be trained, and no more: noise moves the rest as well.
    Where nothing makes noise, what moved was trained."""
    train = content["train"]
    if "trainable" not in train:
        return names
    declared = TrainSpec.model_validate({"trainable": train["trainable"]}).trainable
    chosen = names.trained & set(choose(model, declared))
    if (others := sorted((names.trained & seen.moved) - chosen)) and not content["defenses"]:
        raise SpecError(
            f"train.trainable is declared as {listed(wanted(declared))}, and the clients of "
            f"'{run.root}' moved '{others[0]}' too: leave it out, and what moved is taken."
        )
    return replace(names, trained=chosen)


def infer_part(found: Inferred, model: nn.Module, names: Names, seen: Seen) -> None:
    """What clients train, where it is a part and nobody declared which: an attacker who replays
    them would train the rest along, and lint would look for what is never uploaded."""
    part = names.trained & seen.moved
    if "trainable" in found.train or not part or part == names.trained:
        return
    if (patterns := named_part(model, part)) is not None:
        found.train["trainable"] = list(patterns)
        found.words.append(f"train.trainable is {listed(patterns)}: nothing else moved")


def tell_frozen(run: Run, names: Names, seen: Seen) -> None:
    still = sorted(names.trained - seen.moved)
    if still and len(still) < len(names.trained):
        run.note(
            "part_trained",
            f"{len(names.trained) - len(still)} of {len(names.trained)} parameters are trained: "
            f"the others ('{still[0]}') are never uploaded, or come back as they were sent",
        )

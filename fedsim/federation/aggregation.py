"""Aggregation: the Flower strategy a spec names, and the sum that secure aggregation reveals."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import flwr.serverapp.strategy as flower_strategies
from flwr.app import Message
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedsim.core.defense import Defense
from fedsim.core.errors import RunError, SpecError, did_you_mean
from fedsim.core.learning import Update
from fedsim.core.spec import Spec
from fedsim.defenses.applied import declared, hiding


def create_strategy(spec: Spec) -> Strategy:
    """The Flower strategy a spec names; sampling is ours, so it takes every node it is shown."""
    name = spec.train.strategy
    known = [
        n
        for n in flower_strategies.__all__
        if n not in ("Strategy", "Result") and not n.startswith(("Differential", "FedXgb"))
    ]
    if name in flower_strategies.__all__ and (why := _beyond(name)) is not None:
        raise SpecError(f"train.strategy: {name} {why}.")
    if name not in known:
        raise SpecError(
            f"train.strategy: Flower has no strategy '{name}'{did_you_mean(name, known)}; "
            f"known: {', '.join(known)}."
        )
    _check_options(getattr(flower_strategies, name), spec.train.strategy_options)
    everyone = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
    try:
        strategy: Strategy = getattr(flower_strategies, name)(
            **{**everyone, **spec.train.strategy_options}
        )
    except (TypeError, ValueError) as error:
        raise SpecError(f"train.strategy_options do not fit {name}: {error}.") from error
    return strategy


def _beyond(name: str) -> str | None:
    """Why clients cannot do what a strategy of Flower's asks of them; None where they can."""
    if name.startswith("DifferentialPrivacyClientSide"):
        return (
            "wraps another strategy and has its clients clip their updates by a mod of Flower's; "
            "declare it as what the clients do: defenses=[{name: local_dp}], or clipping"
        )
    if name.startswith("DifferentialPrivacy"):
        return (
            "wraps another strategy and clips and noises what the server has received already, "
            "which hides nothing from that server; declare what the clients do instead: "
            "defenses=[{name: local_dp}]"
        )
    if name.startswith("FedXgb"):
        return "aggregates boosted trees, which have no gradients; the models here are networks"
    return None


def _check_options(strategy: type[Strategy], options: Mapping[str, Any]) -> None:
    """Refuse values of another kind than a strategy's own defaults: most of them look at theirs
    only in the middle of a round."""
    parameters = inspect.signature(strategy).parameters.items()
    defaults = {n: p.default for n, p in parameters if p.default is not inspect.Parameter.empty}
    for name, value in options.items():
        default, fits_ = defaults.get(name), True
        if name == "proximal_mu" and isinstance(value, int | float) and value < 0:
            raise SpecError(
                f"train.strategy_options.proximal_mu is {value!r}: below zero it would drive "
                f"clients away from the model."
            )
        if callable(default) or name.endswith("_fn"):
            raise SpecError(f"train.strategy_options.{name} is a function: no spec can hold one.")
        if isinstance(default, int | float):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            fits_ = isinstance(value, bool) if isinstance(default, bool) else number
            fits_ = fits_ and math.isfinite(value)
            if name.startswith("fraction_"):
                fits_ = fits_ and 0 <= value <= 1
            elif name.startswith("min_"):
                fits_ = fits_ and isinstance(value, int) and value >= 0
        elif isinstance(default, str):
            fits_ = isinstance(value, str)
        if not fits_:
            raise SpecError(
                f"train.strategy_options.{name} is {value!r:.60}; its default is {default!r}."
            )


def refuse_counters(strategy: Strategy, model: Mapping[str, Tensor]) -> None:
    """Raise where a strategy computes with a model's integers as if they had fractions."""
    counters = [name for name, tensor in model.items() if not tensor.is_floating_point()]
    if counters and isinstance(strategy, flower_strategies.QFedAvg):
        raise SpecError(
            f"train.strategy: QFedAvg cannot average counters, and the model has some "
            f"('{counters[0]}'): take another strategy, or a model without BatchNorm."
        )


def refuse_too_few(strategy: Strategy, nodes: int, round_: int) -> None:
    """Raise where a strategy wants more nodes than a round has: it would wait for them forever."""
    asked = [getattr(strategy, key, 1) for key in ("min_train_nodes", "min_available_nodes")]
    if max(asked) > max(1, nodes):
        raise RunError(
            f"round {round_} has {nodes} clients and train.strategy_options asks for at least "
            f"{max(asked)}."
        )


def masking(spec: Spec) -> Defense | None:
    """The defense under which the server can read only the sum of a cohort, if there is one."""
    defenses = declared(spec.defenses)
    mask = hiding(defenses)
    if mask is not None and defenses[-1] is not mask:
        raise SpecError("secure aggregation masks what is uploaded: list it as the last defense.")
    return mask


class Reply(NamedTuple):
    """What one client sent, as it came and as an update."""

    client: int
    message: Message
    update: Update


class CohortSum:
    """The sum of a cohort's masked uploads: one of them alone is noise."""

    def __init__(self, mask: Defense):
        self.mask = mask
        self.total: dict[str, Tensor] = {}
        self.replies: dict[int, Reply] = {}

    def add(self, reply: Reply) -> None:
        """Add an upload to the sum; its own numbers are not kept."""
        for name, tensor in reply.update.tensors.items():
            self.total[name] = self.total[name] + tensor if name in self.total else tensor.clone()
        self.replies[reply.client] = reply._replace(update=replace(reply.update, tensors={}))

    def revealed(self, round_: int, cohort: Sequence[int]) -> Iterator[Reply]:
        """The mean update of those who stayed, as the reply of each: all that their sum tells."""
        if not self.replies:
            return
        stayed = sorted(self.replies)
        sums = self.mask.reveal(self.total, round_, cohort, stayed) or {}
        mean = {name: tensor / len(stayed) for name, tensor in sums.items()}
        for reply in self.replies.values():
            yield reply._replace(update=replace(reply.update, tensors=mean))

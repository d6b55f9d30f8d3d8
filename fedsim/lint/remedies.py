"""Remedies: the overrides of a spec that would remove a finding, ready to be tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from fedsim.core.knowledge import THREATS
from fedsim.core.spec import Component
from fedsim.lint.facts import Facts

SAFE_BATCH = 8
NOTICING = "weight_check"


def mixed(facts: Facts) -> tuple[str, ...]:
    """Several pictures in every update: by the batch, else by a sum over clients. Against a server
    that chooses the weights that is not enough: its clients must refuse them."""
    refusing = guarded(facts) if THREATS[facts.spec.threat.model].deeds else ()
    if facts.shard is None or facts.shard >= SAFE_BATCH:
        return (f"train.batch_size={SAFE_BATCH}", *refusing)
    return (*aggregated(facts), *refusing)


def guards_that_refuse(facts: Facts) -> list[str]:
    """The guards that keep a client from uploading; those that only warn protect nobody."""
    return [c.name for c in facts.spec.guards if c.params.get("refuse")]


def trusted_guards(facts: Facts) -> list[str]:
    """Of the guards that refuse, those that were seen to notice every manoeuvre here, with the
    limits that they were seen with."""
    return [
        c.name
        for c in facts.spec.guards
        if c.name == NOTICING and c.params.get("refuse") and set(c.params) == {"refuse"}
    ]


def guarded(facts: Facts) -> tuple[str, ...]:
    """Clients that look at what they were sent, and refuse."""
    if trusted_guards(facts):
        return ()
    names = list(dict.fromkeys([*(c.name for c in facts.spec.guards), NOTICING]))
    names = names if facts.spec.guards else ["d_snr", NOTICING]
    return (f"guards={_flow([{'name': name, 'refuse': True} for name in names])}",)


def aggregated(facts: Facts) -> tuple[str, ...]:
    if facts.named("secure_aggregation") is not None:
        return more_clients(facts) if facts.spec.cohort_size == 1 else ()
    added = with_defense(facts, {"name": "secure_aggregation"})
    return added if facts.spec.cohort_size > 1 else (*added, *more_clients(facts))


def more_clients(facts: Facts) -> tuple[str, ...]:
    if facts.spec.data.clients > 1:
        return ("train.clients_per_round=null",)
    return ("data.clients=8", "train.clients_per_round=null")


def aggregation_last(facts: Facts) -> tuple[str, ...]:
    every = _plain(facts.spec.defenses)
    last = [c for c in every if c["name"] == "secure_aggregation"]
    return (_defenses([c for c in every if c not in last] + last),)


def with_defense(
    facts: Facts, component: dict[str, Any], instead: str | None = None
) -> tuple[str, ...]:
    every = _plain(facts.spec.defenses)
    others = [c for c in every if c["name"] not in (instead, component["name"])]
    # A sum is masked last: what comes after it would break the masks.
    masked = [c for c in others if c["name"] == "secure_aggregation"]
    rest = [c for c in others if c not in masked]
    return (_defenses([*rest, component, *masked]),)


def without_defense(facts: Facts, name: str) -> tuple[str, ...]:
    return (_defenses([c for c in _plain(facts.spec.defenses) if c["name"] != name]),)


def with_attack(facts: Facts, name: str) -> tuple[str, ...]:
    return (f"attacks={_flow([*_plain(facts.spec.attacks), {'name': name}])}",)


def _plain(components: Sequence[Component]) -> list[dict[str, Any]]:
    return [component.model_dump(mode="json", exclude_none=True) for component in components]


def _defenses(components: list[dict[str, Any]]) -> str:
    return f"defenses={_flow(components)}"


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.strip()

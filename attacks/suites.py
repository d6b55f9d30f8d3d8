"""Suites: fixed ensembles of attacks, by version, which a spec names in place of its own attacks.

A suite has no parameters: whoever tunes it to a defense measures something else, and its numbers
would compare with nobody's. What is better goes into the next version. Members stand in stages, in
the order of their cost; a later stage is not needed for a victim that an earlier one recovered
exactly. Every member is granted what the threat letter grants, and no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedsim.core.errors import SpecError, did_you_mean
from fedsim.core.sections import SUITES, Component

Kind = Literal["closed", "search", "learned", "beside"]


@dataclass(frozen=True)
class Member:
    """One attack of a suite. ``kind``: a closed form, a search, something learned, or an attack
    that claims no picture and stands beside the others; ``owned``: what the attacker must own (of
    a View's fields), which the attack itself could do without; ``evaluations``: how many gradients
    of the client's model it computes for a victim, at most."""

    attack: str
    kind: Kind
    stage: int
    title: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    owned: frozenset[str] = frozenset()
    evaluations: int = 0

    @property
    def component(self) -> Component:
        about = {"title": self.title} if self.title else {}
        return Component.model_validate({"name": self.attack, **self.params, **about})


@dataclass(frozen=True)
class Suite:
    """An ensemble. ``check`` is a member with four times its steps, tried on one victim: how far
    the budget decides what the suite says."""

    version: str
    members: tuple[Member, ...]
    check: Member
    checks: str  # the member whose budget is checked


def suite_called(component: Component) -> Suite:
    """The suite that a spec names."""
    unknown = sorted(component.params.keys() - {"exhaustive"})
    if unknown or component.title is not None:
        raise SpecError(
            f"the suite '{component.name}' has no parameter '{(unknown or ['title'])[0]}'; only "
            f"exhaustive: true, which runs members that are not needed."
        )
    if not isinstance(component.params.get("exhaustive", False), bool):
        raise SpecError(f"the suite '{component.name}': exhaustive is true or false.")
    if component.name not in _SUITES:
        raise SpecError(
            f"there is no suite '{component.name}'{did_you_mean(component.name, _SUITES)}; known: "
            f"{', '.join(_SUITES)}."
        )
    return _SUITES[component.name]


def closed(attack: str, **params: Any) -> Member:
    return Member(attack, "closed", 0, params=params)


_STEPS, _SEEDS = 300, 3


def search(title: str, stage: int, attack: str = "inverting_gradients", **params: Any) -> Member:
    """A search of the suite's own budget, with Adam, which loses less than signed steps do."""
    owned = frozenset({"priors"}) if attack == "gradvit" else frozenset()
    about = {"steps": _STEPS, "seeds": _SEEDS, "optimizer": "adam", "schedule": "cosine", **params}
    evaluations = about["steps"] * about["seeds"]
    return Member(attack, "search", stage, title, about, owned, evaluations)


# One cosine over all layers with three weights of total variation, an order of magnitude apart on
# either side of what suits small networks; layers one by one, which sees those that the head's
# size hides; the same without the head.
_STANDARD_1 = Suite(
    "standard-1",
    (
        closed("patch_solve"),
        closed("row_space"),
        closed("rgap"),
        closed("april_closed"),
        closed("spear"),
        Member("features", "beside", 0),
        Member("membership", "beside", 0),
        search("cosine tv 0.1", 1, tv=0.1),
        search("cosine tv 0.01", 2, tv=0.01),
        search("cosine tv 1", 2, tv=1.0),
        search("layers", 2, cost="layer_cosine", tv=0.1),
        search("without head", 2, tv=0.1, without=["head"]),
        search("grad_inversion", 2, "grad_inversion", batchnorm="required"),
        search("gradvit", 2, "gradvit"),
        Member(
            "gias",
            "learned",
            3,
            params={"space": "z", "steps": _STEPS, "seeds": _SEEDS},
            evaluations=_STEPS * _SEEDS,
        ),
        Member("inverter", "learned", 3),
    ),
    check=search("four times the steps", 2, tv=0.1, steps=4 * _STEPS),
    checks="cosine tv 0.1",
)
_SUITES = {suite.version: suite for suite in (_STANDARD_1,)}
assert set(_SUITES) == set(SUITES), "core.sections names the versions of suites"

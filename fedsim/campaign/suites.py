"""Suites in a plan: which attacks a spec's suite stands for, and which of them come first.

What a suite's members are is said in `fedsim.attacks.suites`; here they meet a spec. Those play
whose needs the threat letter grants; where the spec withholds or does not provide something of
that, the member is missed, and the summary says so. Where clients declare defenses, whatever can
adapt runs both ways: as one that knows of them and as one that does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from fedsim.attacks import ATTACKS, create_attack
from fedsim.attacks.suites import Member, Suite, suite_called
from fedsim.core.attack import needs_of
from fedsim.core.candidates import CANDIDATES
from fedsim.core.defense import Defense
from fedsim.core.errors import SpecError
from fedsim.core.knowledge import FIELDS, THREATS, granted_by
from fedsim.core.registry import resolve
from fedsim.core.spec import Component, Spec
from fedsim.defenses.applied import declared

NAIVE, PICKED = " naive", " picked"


@dataclass(frozen=True)
class Role:
    """What an attack of a plan is in the suite: its ``member``; ``sample``: whether it is the check
    of the budget, tried on one victim."""

    member: Member
    sample: bool = False


@dataclass(frozen=True)
class Cast:
    """A spec's suite with the attacks that play it, and why others do not."""

    suite: Suite
    exhaustive: bool
    parts: tuple[tuple[Component, Role], ...]
    missing: Mapping[str, str]  # member -> what its attacker lacks


def suite_of(spec: Spec) -> Component | None:
    """The suite among a spec's attacks; None where there is none."""
    named = [component for component in spec.attacks if component.is_suite]
    if len(named) > 1:
        raise SpecError("attacks name two suites; one says all that it can.")
    for component in spec.attacks if named else []:
        if component not in named and component.short_name in lines_of(named[0].name):
            raise SpecError(
                f"the title '{component.short_name}' is that of a suite's line in tables; give the "
                f"attack '{component.name}' another title."
            )
    return named[0] if named else None


def lines_of(version: str) -> tuple[str, str]:
    """What the two lines of a suite are called in tables: its worst case and its pick."""
    return version, f"{version}{PICKED}"


def cast_of(spec: Spec) -> Cast | None:
    """Who plays the spec's suite; None where it names none."""
    component = suite_of(spec)
    if component is None:
        return None
    suite = suite_called(component)
    parts: list[tuple[Component, Role]] = []
    missing: dict[str, str] = {}
    for member in suite.members:
        if not _wanted(member) <= THREATS[spec.threat.model].grants | {CANDIDATES}:
            continue  # it belongs to another letter
        if lacking := _lacking(member, spec):
            missing[member.component.short_name] = lacking
            continue
        ways = both_ways([member.component], spec.defenses) if _tells(spec) else [member.component]
        parts += [(way, Role(member)) for way in ways]
    if not parts and not missing:
        raise SpecError(
            f"{suite.version} has no member for threat {spec.threat.model}; its members play from "
            f"B on."
        )
    if any(role.member.title == suite.checks for _, role in parts):
        parts.append((suite.check.component, Role(suite.check, sample=True)))
    return Cast(suite, component.params.get("exhaustive", False), tuple(parts), missing)


def _tells(spec: Spec) -> bool:
    """Whether this attacker knows of the defenses, so that there are two ways."""
    return "defenses" in granted_by(spec.threat)


def _lacking(member: Member, spec: Spec) -> str | None:
    """What keeps a member from playing, of what its threat letter allows for: fields that this spec
    withholds, or that nobody provides."""
    provided = {
        "surrogate": spec.threat.surrogate,
        "priors": spec.threat.prior,
        "generator": spec.threat.generator,
        CANDIDATES: spec.threat.candidates or None,
    }
    for name in sorted(_wanted(member)):
        if name in spec.threat.withhold:
            return f"threat.withhold takes {name} ({FIELDS[name]}) from it"
        if name in provided and provided[name] is None:
            section = {"priors": "prior"}.get(name, name)
            return f"the spec provides no {FIELDS[name]} (threat.{section})"
    return None


def _wanted(member: Member) -> frozenset[str]:
    """All that a member cannot play without."""
    return needs_of(create_attack(member.attack, **member.params)) | member.owned


def both_ways(attacks: Iterable[Component], components: Iterable[Component]) -> Iterator[Component]:
    """Attacks as they are, and once more as if they knew of no defense, where that can differ."""
    defenses = declared(components)
    countered = any(type(defense).counter is not Defense.counter for defense in defenses)
    for attack in attacks:
        yield attack
        if countered and "adaptive" not in attack.params and _adapts(attack):
            content = attack.model_dump(mode="json", exclude_none=True)
            title = f"{attack.short_name}{NAIVE}"
            try:
                naive = Component.model_validate({**content, "title": title, "adaptive": False})
            except ValidationError as error:
                raise SpecError(f"'{title}' is too long a name; shorten its title.") from error
            yield naive


def _adapts(attack: Component) -> bool:
    if attack.is_suite:  # whose members are asked one by one
        return False
    fields = dataclasses.fields(resolve("attack", ATTACKS, attack.name))
    return any(field.name == "adaptive" for field in fields)

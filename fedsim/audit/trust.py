"""Trust: whose word is enough to have code imported.

A spec may name models, attacks, defenses, data sets and generators by import path, and importing a
module runs it. What the user gives, a spec or the words of a command, is the user's own word. A run
directory may come from anybody: what its spec and its observations name is imported where the user
named it too, or said to trust the directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedsim.attacks import ATTACKS
from fedsim.attacks.generators import GENERATORS
from fedsim.attacks.manoeuvres import MANOEUVRES
from fedsim.clients.data.datasets import DATASETS
from fedsim.clients.data.hub import PREFIX
from fedsim.core.errors import DamagedError, FedsimError, RunError, SpecError
from fedsim.core.factories import is_import_path
from fedsim.core.files import read_json
from fedsim.core.registry import is_registered
from fedsim.core.run import Run, list_observations
from fedsim.core.spec import Component, Spec, ThreatSpec
from fedsim.defenses import DEFENSES
from fedsim.defenses.guards import GUARDS

_OURS = {**ATTACKS, **DEFENSES, **GUARDS, **MANOEUVRES, **DATASETS, **GENERATORS}


def import_paths(*parts: Spec | ThreatSpec | Component) -> set[str]:
    """Every import path in a spec, or in parts of one, that is not one of ours."""
    return {path for part in parts for path in _foreign(_naming(part))}


def announced_in(observations: Path) -> set[str]:
    """Every import path that observations announce; one that cannot be read announces nothing."""
    found: set[str] = set()
    for path in list_observations(observations):
        try:
            about = read_json(path)
        except (FileNotFoundError, DamagedError):
            continue
        if isinstance(about, Mapping):
            chosen = about.get("chosen")
            manoeuvre = chosen.get("manoeuvre") if isinstance(chosen, Mapping) else None
            architecture = about.get("architecture")
            model = architecture.get("name") if isinstance(architecture, Mapping) else None
            named = [about.get("defenses"), manoeuvre, _network(model)]
            found |= set(_foreign(named))
    return found


def named_in(run: Run) -> set[str]:
    """Every import path that a run directory names."""
    try:
        spec = import_paths(run.spec)
    except FedsimError:  # missing or damaged: nothing is built from it
        spec = set()
    return spec | announced_in(run.observations)


def refuse_strangers(
    where: Path, named: Iterable[str], own: Iterable[str] = (), *, trust: bool = False
) -> None:
    """Raise where a directory names code that the user did not name; ``own`` is what they did."""
    strangers = sorted(set(named) - set(own))
    if strangers and not trust:
        raise RunError(
            f"'{where}' names code by import path ({', '.join(strangers[:3])}), which would be "
            f"run; if it is yours, add --trust, or give the spec again where the command takes one."
        )


def refuse_other_code(run: Run, spec: Spec) -> None:
    """Raise where observations announce code that the spec of their run does not name."""
    strangers = sorted(announced_in(run.observations) - import_paths(spec))
    if strangers:
        raise RunError(
            f"an observation in '{run.root}' announces {strangers[0]}, which its spec does not "
            f"name: it is not of this run, and nothing is done with it."
        )


def refuse_imports(spec: Spec, *, trust: bool = False) -> None:
    """Raise where a spec that is only looked at names code by import path."""
    named = sorted(import_paths(spec))
    if named and not trust:
        raise SpecError(
            f"the spec names code by import path ({', '.join(named[:3])}), which would be run; if "
            f"it is yours, add --trust."
        )


def _naming(part: Spec | ThreatSpec | Component) -> list[Any]:
    """The values by which things are named: those of other keys are never imported."""
    if isinstance(part, Component):
        return [part.name, part.params]
    if isinstance(part, ThreatSpec):
        surrogate, generator = part.surrogate, part.generator
        return [surrogate and surrogate.name, generator and [generator.name, generator.options]]
    server = [part.server.manoeuvre] if part.server.manoeuvre else []
    named = (*part.attacks, *part.defenses, *part.guards, *server)
    components = [_naming(component) for component in named]
    return [part.data.name, _network(part.model.name), *components, *_naming(part.threat)]


def _network(name: Any) -> str | None:
    """The name of a model, where it is an import path and none of timm's."""
    return name if isinstance(name, str) and is_import_path(name) else None


def _foreign(value: Any) -> Iterator[str]:
    """The strings anywhere in a value that could be import paths, and are none of ours."""
    if isinstance(value, str):
        if ":" in value and not value.startswith(PREFIX) and not is_registered(_OURS, value):
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _foreign(inner)

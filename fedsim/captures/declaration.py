"""Declaration: what whoever captures an app says of it, and where the app lies.

What a server cannot see of its clients' training is declared by the names of a spec's ``train``
section. A mistake in a declaration is told and left out: it can be said again to `fedsim audit`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fedsim.core.errors import SpecError, did_you_mean
from fedsim.core.factories import is_import_path
from fedsim.core.sections import TrainSpec
from fedsim.core.spec import load_spec

# What a federation does, and what only fedsim's own engines ask for.
UNDECLARED = frozenset(
    {"rounds", "clients_per_round", "upload", "strategy", "strategy_options", "timeout"}
    | {"patience", "max_norm", "max_examples", "evaluate"}
)
DECLARED = tuple(key for key in TrainSpec.model_fields if key not in UNDECLARED)


@dataclass
class Declaration:
    """What is said of an app, as sections of a spec, and what is wrong with it in sentences."""

    model: dict[str, Any]
    data: dict[str, Any]
    classes: int | None
    train: dict[str, Any]
    defenses: list[Any]
    app: str | None = None  # the folder in which its modules are found
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        model: Any,
        image_size: Any,
        mean: Any,
        std: Any,
        classes: Any,
        train: Mapping[str, Any],
        defenses: Any,
    ) -> Declaration:
        """The declaration of these words; what cannot be one is left out and told."""
        named, app, problems = named_model(model)
        found = cls(named, {}, None, {}, [], app, problems)
        found._say("data", "image_size", _side(image_size))
        found._say("data", "mean", _colour(mean))
        found._say("data", "std", _colour(std))
        if isinstance(classes, int) and not isinstance(classes, bool) and classes > 1:
            found.classes = classes
        elif classes is not None:
            problems.append(f"classes is {classes!r}, not a number of classes; say it again.")
        for key, value in train.items():
            if key not in DECLARED:
                near = did_you_mean(key, DECLARED)
                problems.append(f"there is no '{key}' to declare{near}; it is left out.")
            else:
                found._say("train", key, _plain(value))
        try:
            kept = [_component(defense) for defense in defenses or []]
            load_spec({"defenses": kept})
            found.defenses = kept
        except (SpecError, TypeError, ValueError) as error:
            problems.append(f"the defenses cannot be declared so and are left out: {error}")
        return found

    def _say(self, section: str, key: str, value: Any) -> None:
        if value is None:
            return
        kept: dict[str, Any] = getattr(self, section)
        extra = {"upload": "delta"} if section == "train" else {}
        try:
            load_spec({section: {**extra, **kept, key: value}})
            kept[key] = value
        except (SpecError, TypeError, ValueError) as error:
            self.problems.append(f"'{key}' cannot be declared so and is left out: {error}")


def named_model(model: Any) -> tuple[dict[str, Any], str | None, list[str]]:
    """A model as a spec names it, the folder of the app that has it, and what is in the way of
    building it again: ``model`` is a class, a function, a partial of one, a model, a name of timm's
    or an import path, or a mapping of ``name`` and ``options``."""
    name, options, problems = _named(model)
    if name is None:
        return {}, None, problems
    content = {"name": name, **({"options": options} if options else {})}
    try:
        load_spec({"model": content})
    except (SpecError, TypeError, ValueError) as error:
        problems.append(f"the model's options cannot be written down and are left out: {error}")
        content = {"name": name}
    return content, _folder_of(name), problems


def _named(model: Any) -> tuple[str | None, dict[str, Any], list[str]]:
    if model is None:
        return (
            None,
            {},
            ["no model is declared; say it to the audit: model.name=package.module:Net."],
        )
    if isinstance(model, str):
        return model, {}, []
    if isinstance(model, Mapping):
        return str(model.get("name", "")) or None, dict(model.get("options") or {}), []
    if isinstance(model, functools.partial):
        return _named_partial(model)
    if isinstance(model, nn.Module):
        return _named_instance(model)
    name = _import_path(model)
    if name is None:
        return None, {}, [f"model is a {type(model).__name__}, which names no model."]
    return name, {}, _in_the_way(model, name)


def _named_partial(model: functools.partial[Any]) -> tuple[str | None, dict[str, Any], list[str]]:
    options = {key: value for key, value in model.keywords.items() if key != "pretrained"}
    path = _import_path(model.func) or ""
    if path.startswith("timm.") and model.func.__name__ == "create_model":
        name = model.args[0] if model.args else options.pop("model_name", None)
        return (str(name), options, []) if name else (None, {}, ["timm's model has no name."])
    problems = _in_the_way(model.func, path)
    if model.args:
        problems.append("arguments of the model's partial without a name are left out.")
    return path or None, options, problems


def _named_instance(model: nn.Module) -> tuple[str | None, dict[str, Any], list[str]]:
    """A model that is made already is known by its class: what it was made with is not in it."""
    known = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    timms = known.get("architecture") if isinstance(known, Mapping) else None
    if type(model).__module__.startswith("timm.") and timms:
        return str(timms), {}, []
    name = _import_path(type(model))
    assert name is not None
    return name, {}, _in_the_way(type(model), name)


def _import_path(thing: Any) -> str | None:
    module, place = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    return f"{module}:{place}" if module and place else None


def _in_the_way(thing: Any, name: str) -> list[str]:
    """Why the audit could not import this, in a sentence."""
    module, _, place = name.partition(":")
    if module == "__main__":
        return [
            f"the model '{place}' stands in the script that is run, which the audit cannot import; "
            f"put it into a module of its own, or name it there: model='module:{place}'."
        ]
    if "<" in place:
        kind = "a lambda" if "<lambda>" in place else "made inside a function"
        return [
            f"the model '{place}' is {kind}, which the audit cannot import; name a class or a "
            f"function at the top of a module: model='package.module:factory'."
        ]
    found: Any = sys.modules.get(module)
    for part in place.split("."):
        found = getattr(found, part, None)
    if found is not thing:
        return [f"'{name}' is another thing than the model that was declared."]
    return []


def _folder_of(name: str) -> str | None:
    """The folder from which a module is imported; None for what is installed."""
    if not is_import_path(name):
        return None
    top = sys.modules.get(name.partition(":")[0].split(".")[0])
    file = getattr(top, "__file__", None)
    if not file:
        return None
    folder = Path(file).absolute().parent
    folder = folder.parent if Path(file).name == "__init__.py" else folder
    installed = {"site-packages", "dist-packages"} & set(folder.parts)
    return None if installed else str(folder)


def _side(image_size: Any) -> Any:
    if isinstance(image_size, Sequence) and not isinstance(image_size, str):
        sides = {int(side) for side in image_size[-2:]}
        return sides.pop() if len(sides) == 1 else list(image_size)
    return image_size


def _colour(value: Any) -> Any:
    """Three numbers: one is that of all channels."""
    if value is None:
        return None
    numbers = [float(v) for v in (value if isinstance(value, Iterable) else [value])]
    return numbers * 3 if len(numbers) == 1 else numbers


def _plain(value: Any) -> Any:
    """A value as YAML has it: tuples are lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _component(defense: Any) -> dict[str, Any]:
    return {"name": defense} if isinstance(defense, str) else dict(defense)

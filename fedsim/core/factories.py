"""Factories: models by import path, ``package.module:factory``, from anybody's code.

A factory is any callable that gives an `nn.Module`: a class, a function, torchvision's builders, a
class of Hugging Face's transformers, which is made of its own configuration. It is told the number
of classes and the size of a picture where it takes them, under the names people give them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedsim.core.anatomy import Found, remember
from fedsim.core.dissection import dissect
from fedsim.core.errors import FedsimError, ModelError
from fedsim.core.registry import find
from fedsim.core.seal import sealed

CLASSES = ("num_classes", "num_labels", "classes", "n_classes")
SIDES = ("image_size", "img_size", "input_size")
_MOST = 64  # dissections that are kept


def is_import_path(name: str) -> bool:
    return ":" in name and not name.startswith("hf-hub:")


def build_by_path(
    name: str, options: Mapping[str, Any], *, image_size: int, num_classes: int, seed: int
) -> nn.Module:
    """The model of a factory, dissected; the same seed gives the same weights."""
    factory = find("model", {}, name)
    if not callable(factory):
        raise ModelError(f"the model '{name}' is a {type(factory).__name__}, which builds nothing.")
    with torch.random.fork_rng(devices=[]), sealed():
        torch.manual_seed(seed)
        try:
            model = _called(factory, options, image_size, num_classes)
            if isinstance(model, nn.Module):
                _wake(model, image_size)
        except Exception as error:  # its author's code may fail in any way
            raise ModelError(f"'{name}' could not be built: {_said(error)}.") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"'{name}' gives a {type(model).__name__}, not a torch model.")
    known = _Known(factory, repr(sorted(options.items())))
    return adopt(model, name, image_size=image_size, num_classes=num_classes, known=known)


def adopt(
    model: nn.Module, name: str, *, image_size: int, num_classes: int, known: _Known | None = None
) -> nn.Module:
    """A model of somebody's own as the testbed takes it: in float32, with logits alone for an
    output, its parts found; one that does not fit the data is an error."""
    model.register_forward_hook(logits_alone)
    model = model.float()
    _refuse_odd_state(model, name)
    _name_once(model)
    found = known.found(model, image_size) if known else None
    if found is None:
        found = _dissected(model, name, image_size)
    if known:
        known.keep(model, image_size, found)
    if found.classes != num_classes:
        raise ModelError(
            f"'{name}' tells {found.classes} classes apart and the data has {num_classes}; its "
            f"factory takes none of {', '.join(CLASSES)}: give it in model.options, name a factory "
            f"that takes one, or declare classes={found.classes} of a captured app."
        )
    remember(model, found)
    return model


def logits_alone(module: nn.Module, given: Any, output: Any) -> Any:
    """Of an output that is more than logits (Hugging Face's, one with auxiliary heads, or a
    dictionary), the logits."""
    of_keys = output.get("logits") if isinstance(output, Mapping) else None
    logits = getattr(output, "logits", of_keys)
    return logits if isinstance(logits, Tensor) else output


def _refuse_odd_state(model: nn.Module, name: str) -> None:
    """Raise where a model's state is more than real numbers: those alone travel."""
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"'{name}' keeps a {type(value).__name__} in its state ('{key}'), which no message "
                f"carries; keep it in a tensor, or out of the state."
            )
        if value.is_complex():
            raise ModelError(
                f"'{name}' has complex numbers ('{key}'), which no message carries; keep their "
                f"real and imaginary parts, and use torch.view_as_complex in forward."
            )


def _name_once(model: nn.Module) -> None:
    """Let every tensor of a model have one name in its state, where several modules share it: an
    update names it once, so a second name would bring back what was before."""
    again = second_names(model)
    if not again:
        return

    def leave_out(_: nn.Module, state: dict[str, Any], prefix: str, *more: Any) -> None:
        for name in again:
            state.pop(f"{prefix}{name}", None)

    def fill_in(_: nn.Module, state: dict[str, Any], prefix: str, *more: Any) -> None:
        for name, known in again.items():
            if f"{prefix}{known}" in state:
                state[f"{prefix}{name}"] = state[f"{prefix}{known}"]

    model.register_state_dict_post_hook(leave_out)
    model.register_load_state_dict_pre_hook(fill_in)


def second_names(model: nn.Module) -> dict[str, str]:
    """Of every tensor that several modules share, the names beside its first, which they mean."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    for name, tensor in named:
        first.setdefault(id(tensor), name)
    return {name: first[id(tensor)] for name, tensor in named if first[id(tensor)] != name}


_KNOWN: dict[tuple[object, ...], tuple[object, Found]] = {}


class _Known:
    """What earlier models of the same factory were found to be: every client builds one in every
    round, and they differ in their numbers alone."""

    def __init__(self, factory: object, options: str):
        self.factory, self.options = factory, options

    def _key(self, model: nn.Module, side: int) -> tuple[object, ...]:
        shapes = tuple((name, tuple(t.shape)) for name, t in model.state_dict().items())
        return id(self.factory), self.options, side, shapes

    def found(self, model: nn.Module, side: int) -> Found | None:
        known = _KNOWN.get(self._key(model, side))
        return known[1] if known else None

    def keep(self, model: nn.Module, side: int, found: Found) -> None:
        while len(_KNOWN) >= _MOST:
            del _KNOWN[next(iter(_KNOWN))]
        _KNOWN[self._key(model, side)] = (self.factory, found)  # held, so that its id stays its own


def _dissected(model: nn.Module, name: str, side: int) -> Found:
    with sealed():
        try:
            return dissect(model, side)
        except FedsimError as error:
            raise ModelError(f"'{name}': {error}") from error
        except Exception as error:
            if _takes(model, torch.zeros(2, 1, side, side)):
                raise ModelError(
                    f"'{name}' takes grey pictures, and those here have three channels; give its "
                    f"factory the number of channels, in model.options."
                ) from error
            raise ModelError(
                f"'{name}' does not take a picture of (1, 3, {side}, {side}): {_said(error)}; name "
                f"one whose forward takes pictures alone, a subclass for example."
            ) from error


def _takes(model: nn.Module, pictures: Tensor) -> bool:
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(pictures)
    except Exception:  # that it fails is the answer
        return False
    finally:
        model.train(training)
    return True


def _wake(model: nn.Module, side: int) -> None:
    """Give layers that wait for their first input theirs."""
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, side, side))
        model.train()


def _called(factory: Any, options: Mapping[str, Any], side: int, classes: int) -> Any:
    """The factory's model; what it is offered it is given as far as it takes it."""
    settings = getattr(factory, "config_class", None)
    if isinstance(factory, type) and callable(settings):
        known = settings()
        for key in options:
            if not hasattr(known, key):  # which a configuration would take, and nobody read
                raise TypeError(f"{type(known).__name__} has no '{key}'")
        return factory(settings(**{"num_labels": classes, "image_size": side, **options}))
    offered = {**dict.fromkeys(CLASSES, classes), **dict.fromkeys(SIDES, side)}
    parameters = inspect.signature(factory).parameters.values()
    named = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY)}
    taken = {key: value for key, value in offered.items() if key in named}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        return factory(**{**taken, **options})
    return _offered(factory, {**taken, **options}, offered)


def _offered(
    factory: Callable[..., Any], given: Mapping[str, Any], offered: Mapping[str, int]
) -> Any:
    """The model of a factory that takes anything and hands it on: nobody tells what is taken at
    the end, so the usual names are tried, then fewer of them."""
    for keys in _GUESSES:
        try:
            return factory(**{**{key: offered[key] for key in keys}, **given})
        except TypeError as error:
            if not any(f"'{key}'" in str(error) for key in keys if key not in given):
                raise
    return factory(**given)


_GUESSES = (("num_classes", "image_size"), ("num_classes", "img_size"), ("num_classes",))


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (
        f"{type(error).__name__}: {lines[0][:200]}".rstrip(".") if lines else type(error).__name__
    )

"""Names: how the arrays that an app sends are called in the model that was declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from fedsim.captures.arrays import STATISTICS
from fedsim.captures.log import Head, Messages, read_head, write_head
from fedsim.core.anatomy import batchnorm_names
from fedsim.core.errors import ModelError
from fedsim.core.factories import second_names
from fedsim.core.files import read_tensors
from fedsim.core.run import Run, weights_path
from fedsim.core.trainable import saved_names


@dataclass(frozen=True)
class Names:
    """The model's own names for what was sent: where arrays came as a list, by their places."""

    state: dict[str, Tensor]  # of a model as it is made
    trained: frozenset[str]
    statistics: frozenset[str]  # of BatchNorm layers
    listed: tuple[str, ...] = ()
    # By other names: those that peft gives to adapters, and the second ones of shared tensors.
    saved: Mapping[str, str] = field(default_factory=dict)

    def of(self, name: str) -> str:
        """The model's own name of an array."""
        if self.listed and name.isdigit():
            return self.listed[int(name)]
        return name if name in self.state else self.saved.get(name, name)

    def stored(self, name: str) -> tuple[str, str]:
        """Of a tensor in an observation's file its kind, and the model's own name."""
        kind, _, sent = name.partition("/")
        return kind, self.of(sent)


def names_in(run: Run, head: Head, model: nn.Module, rounds: list[Messages]) -> Names:
    """How what was sent is called in the model; an error where it is of another model."""
    state = model.state_dict()
    trained = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
    layers = batchnorm_names(model)
    statistics = frozenset(f"{layer}.{kind}" for layer in layers for kind in STATISTICS)
    first = next(m for m in rounds if m.weights and any(r.kept for r in m.replies))
    sent, _ = read_tensors(weights_path(run.observations, first.round))
    listed = tuple(head.listed)
    if first.listed and not listed:
        listed = head.listed = _order(run, model, sent)
        write_head(run.root, head)  # before a name is changed on the disk
    others = {**saved_names(model), **second_names(model)}
    names = Names(state, trained, statistics, listed, others)
    for name, tensor in sent.items():
        own = state.get(names.of(name))
        if own is None or own.shape != tensor.shape:
            what = "does not have" if own is None else f"has as {tuple(own.shape)}"
            raise ModelError(
                f"the app of '{run.root}' trains another model than the one declared: it sends "
                f"'{name}' {tuple(tensor.shape)}, which that {what}; declare model.name and "
                f"model.options as the app makes it."
            )
    return names


def _order(run: Run, model: nn.Module, sent: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The names of arrays that came as a list: those of the whole state, of the parameters, or of
    those that peft keeps of a model with adapters."""
    state = model.state_dict()
    shapes = [sent[place].shape for place in sorted(sent, key=int)]
    parameters = [name for name, _ in model.named_parameters()]
    for order in (list(state), parameters, list(saved_names(model).values())):
        if [state[name].shape for name in order] == shapes:
            return tuple(order)
    raise ModelError(
        f"the app of '{run.root}' sends {len(shapes)} arrays without names, and they do not have "
        f"the shapes of '{_called(run)}', which has {len(state)}; declare the model that it trains."
    )


def _called(run: Run) -> str:
    return str(read_head(run.root).model.get("name", "the model declared"))

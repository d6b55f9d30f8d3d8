"""Defenses applied: the ones a spec or an observation declares, the model they leave, and what a
server that knows of them makes of an update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from fedsim.core.augment import mixes
from fedsim.core.defense import Defense, Informed
from fedsim.core.errors import SpecError
from fedsim.core.knowledge import Client
from fedsim.core.learning import Protocol, Update, local_update
from fedsim.core.losses import Loss
from fedsim.core.models import build_architecture
from fedsim.core.observation import Public
from fedsim.core.spec import Component, ModelSpec, TrainSpec
from fedsim.core.trainable import restricted
from fedsim.defenses import create_defenses


def declared(components: Iterable[Component | Mapping[str, Any]]) -> list[Defense]:
    """The defenses of a spec, or of what an observation makes public, in the order they act."""
    return create_defenses([Component.model_validate(component) for component in components])


def prepared(
    model: nn.Module,
    defenses: Iterable[Defense],
    train: TrainSpec | Protocol | None = None,
    *,
    seed: int = 0,
) -> nn.Module:
    """The model as these defenses leave it, training what ``train`` says; known to client and
    server alike. ``seed`` is that of the model's weights, for adapters that are added to them."""
    defenses = list(defenses)
    for defense in defenses:
        model = defense.prepare_model(model)
    if train is None:
        return model
    model = restricted(model, train.trainable, train.lora, seed=seed)
    for defense in defenses:
        defense.check_trained(model)
    return model


def announced(public: Public) -> nn.Module:
    """The architecture the federation agreed on, without weights, declared defenses included."""
    parts = public.architecture, public.num_classes, public.image_size
    return built(*parts, public.defenses, public.protocol)


def built(
    architecture: Mapping[str, Any],
    num_classes: int,
    image_size: int,
    defenses: Iterable[Component | Mapping[str, Any]],
    train: Protocol | None = None,
) -> nn.Module:
    """A model as these defenses leave it, from what an observation makes public of it."""
    model = build_architecture(
        ModelSpec.model_validate(architecture), image_size=image_size, num_classes=num_classes
    )
    return prepared(model, declared(defenses), train)


def countered(
    update: Update, defenses: Iterable[Component | Mapping[str, Any]], model: nn.Module
) -> Informed:
    """The update after every declared defense was countered, the last one first."""
    informed = Informed(update.widened())
    for defense in reversed(declared(defenses)):
        informed = defense.counter(informed, model)
    return informed


def client_of(
    defenses: Iterable[Component | Mapping[str, Any]],
    round_: int,
    client: int,
    cohort: Sequence[int] = (),
) -> Client:
    """A client's work in one round under these defenses, as a server simulates it that knows them.
    Masks that only the sum of a cohort undoes are left out: what is read is that sum."""
    acting = [
        defense.at_round(round_, client, cohort)
        for defense in declared(defenses)
        if hiding([defense]) is None
    ]
    return partial(local_update, defenses=acting)


def refuse_other_training(train: TrainSpec, defenses: Sequence[Defense]) -> None:
    """Raise where a defense takes the place of a part of the training that a spec asks for: the
    spec would say what nobody does."""
    for defense in defenses:
        if type(defense).batch_gradient is not Defense.batch_gradient:
            asked = {
                "train.loss": train.loss != Loss(),
                "train.precision": train.precision != "float32",
                "train.accumulate": train.accumulate > 1,
                "train.augment with mixtures": mixes([a.model_dump() for a in train.augment]),
            }
            for key in (key for key, there in asked.items() if there):
                raise SpecError(
                    f"the defense {type(defense).__name__} computes gradients of its own, of plain "
                    f"cross-entropy on single labels in float32, so {key} would do nothing; leave "
                    f"one of the two out."
                )
    if train.upload_dtype != "float32" and hiding(defenses) is not None:
        raise SpecError(
            f"secure aggregation uploads whole numbers, so train.upload_dtype "
            f"{train.upload_dtype} would do nothing; leave it out."
        )


def hiding(defenses: Sequence[Defense]) -> Defense | None:
    """The defense under which the server reads only the sum of a cohort, if there is one."""
    return next((d for d in defenses if type(d).reveal is not Defense.reveal), None)

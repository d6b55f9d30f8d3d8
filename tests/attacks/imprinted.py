"""A stage for the imprints: clients that were sent chosen weights, and what a server then sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.attacks import create_attack
from fedsim.core.attack import Reconstruction, no_progress
from fedsim.core.knowledge import THREATS, Announced, Traffic, View
from fedsim.core.learning import Update, local_update
from fedsim.core.manoeuvre import Brief, Manoeuvre, Tampered
from fedsim.core.models import build_model
from fedsim.core.observation import Observation, Public
from fedsim.core.sent import Chosen
from fedsim.core.spec import DataSpec, ModelSpec, Spec, TrainSpec
from tests.staging import CPU, photos

SIDE, CLASSES = 32, 8
MODEL = ModelSpec(options={"patch_size": 8, "depth": 3, "embed_dim": 96, "num_heads": 3})
VICTIMS, OWNED = [70, 10, 130, 200], list(range(20, 60, 4))


def public_of(model: ModelSpec = MODEL, train: TrainSpec | None = None, side: int = SIDE) -> Public:
    train = train or TrainSpec(batch_size=len(VICTIMS))
    return Public.of(Spec(data=DataSpec(image_size=side), model=model, train=train), CLASSES)


def brief_of(
    manoeuvre: Manoeuvre,
    public: Public,
    *,
    surrogate: bool = True,
    round_: int = 1,
    cohort: Sequence[int] = (0,),
) -> Brief:
    def fresh() -> nn.Module:
        spec = ModelSpec.model_validate(public.architecture)
        return build_model(spec, image_size=public.image_size, num_classes=CLASSES, seed=0)

    owned = photos(public.image_size, OWNED)[0] if surrogate else None
    weights = fresh().state_dict()
    return Brief(round_, 0, tuple(cohort), weights, fresh, public, owned)


def loaded(brief: Brief, tampered: Tampered) -> nn.Module:
    model = brief.model()
    model.load_state_dict({**brief.weights, **tampered.changed})
    return model


def view_of(
    brief: Brief, tampered: Tampered, update: Update, traffic: Mapping[int, View] | None = None
) -> View:
    weights = {**brief.weights, **tampered.changed}
    public = replace(brief.public, batch_size=brief.public.batch_size * len(brief.cohort))
    earlier = traffic or {}
    channel = Traffic(tuple((r, 0) for r in earlier), lambda r, c: earlier[r])
    chosen = Chosen(manoeuvre={"name": "imprint"}, about=tampered.about)
    return View(
        Observation(brief.round, 0, weights, update, public, chosen=chosen),
        THREATS["F"].grants,
        Announced(brief.model),
        traffic=lambda: channel,
    )


def played(
    manoeuvre: Manoeuvre,
    images: Tensor,
    labels: Tensor | None = None,
    *,
    model: ModelSpec = MODEL,
    train: TrainSpec | None = None,
    steps: int = 1,
    **options: Any,
) -> View:
    """One client's round, and what the server sees of it."""
    train = train or TrainSpec(batch_size=len(images))
    brief = brief_of(manoeuvre, public_of(model, train, images.shape[-1]), **options)
    tampered = manoeuvre.tamper(brief)
    labels = torch.full((len(images),), 3) if labels is None else labels
    batches = list(zip(images.chunk(steps), labels.chunk(steps), strict=True))
    update = local_update(loaded(brief, tampered), batches, brief.public.protocol)
    return view_of(brief, tampered, update)


def decoded(view: View, name: str = "imprint", **params: Any) -> Reconstruction:
    """What the attack makes of it, its ledger checked against what it said it needs and uses."""
    attack = create_attack(name, **params)
    result = attack.reconstruct(view, device=CPU, progress=no_progress)
    assert set(view.ledger) <= attack.needs | attack.uses
    return result

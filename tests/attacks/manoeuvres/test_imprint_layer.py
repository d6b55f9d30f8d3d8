"""The imprint layer: a module before any model, and the federations it refuses."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks.manoeuvres import create_manoeuvre
from fedsim.attacks.manoeuvres.imprint_layer import Imprinted, ImprintLayer
from fedsim.core.errors import SpecError
from fedsim.core.models import build_model, head_names
from fedsim.core.spec import ModelSpec, TrainSpec
from tests.attacks.imprinted import CLASSES, MODEL, SIDE, brief_of, public_of


@pytest.mark.parametrize("spec", [MODEL, ModelSpec(name="resnet18")])
def test_it_stands_before_any_model_whose_head_is_still_found(spec: ModelSpec) -> None:
    model = build_model(spec, image_size=SIDE, num_classes=CLASSES, seed=0)
    prepared = create_manoeuvre("imprint_layer", bins=16).prepare_model(model)
    assert isinstance(prepared, Imprinted)
    assert prepared(torch.rand(2, 3, SIDE, SIDE)).shape == (2, CLASSES)
    assert all(name.startswith("model.") for name in head_names(prepared))


def test_thresholds_ascend_and_rows_are_equal() -> None:
    manoeuvre = ImprintLayer(bins=16)
    tampered = manoeuvre.tamper(brief_of(manoeuvre, public_of()))
    thresholds = -tampered.changed["imprint_first.bias"]
    assert bool((thresholds.diff() > 0).all())
    rows = tampered.changed["imprint_first.weight"]
    assert torch.equal(rows, rows[:1].expand_as(rows))
    assert tampered.about == {"bins": 16, "side": SIDE}
    blind = manoeuvre.tamper(brief_of(manoeuvre, public_of(), surrogate=False))
    assert "usual" in blind.words


def test_federations_in_which_it_cannot_work_are_refused() -> None:
    model = build_model(MODEL, image_size=SIDE, num_classes=CLASSES, seed=0)
    with pytest.raises(SpecError, match="side: 32"):
        ImprintLayer(side=64).check_model(model, public_of())
    adam = TrainSpec(upload="delta", local_steps=1, optimizer="adamw")
    with pytest.raises(SpecError, match="AdamW"):
        ImprintLayer().check_model(model, public_of(train=adam))
    manoeuvre = ImprintLayer()
    with pytest.raises(SpecError, match="prepare"):
        manoeuvre.tamper(brief_of(create_manoeuvre("imprint"), public_of()))

"""The imprint layer: bins by quantiles of brightness, and the federations it refuses."""

from __future__ import annotations

import pytest
import torch

from fedsim.attacks.manoeuvres.imprint_layer import ImprintLayer
from fedsim.core.errors import SpecError
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec, TrainSpec
from tests.attacks.imprinted import CLASSES, MODEL, SIDE, brief_of, public_of

BINNED = ModelSpec(name=MODEL.name, options={**MODEL.options, "imprint_layer": 16})


def test_thresholds_ascend_and_rows_are_equal() -> None:
    manoeuvre = ImprintLayer()
    tampered = manoeuvre.tamper(brief_of(manoeuvre, public_of(BINNED)))
    thresholds = -tampered.changed["imprint_first.bias"]
    assert bool((thresholds.diff() > 0).all())
    rows = tampered.changed["imprint_first.weight"]
    assert torch.equal(rows, rows[:1].expand_as(rows))
    assert tampered.about == {"bins": 16}
    blind = manoeuvre.tamper(brief_of(manoeuvre, public_of(BINNED), surrogate=False))
    assert "usual" in blind.words


def test_federations_in_which_it_cannot_work_are_refused() -> None:
    plain, binned = (
        build_model(spec, image_size=SIDE, num_classes=CLASSES, seed=0) for spec in (MODEL, BINNED)
    )
    with pytest.raises(SpecError, match=r"announce one, model\.options\.imprint_layer=128"):
        ImprintLayer().check_model(plain, public_of())
    adam = TrainSpec(upload="delta", local_steps=1, optimizer="adamw")
    with pytest.raises(SpecError, match="AdamW"):
        ImprintLayer().check_model(binned, public_of(BINNED, train=adam))
    ImprintLayer().check_model(binned, public_of(BINNED))

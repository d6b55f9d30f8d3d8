"""Diagnosis: the field that was declared wrongly is named, whichever it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedsim
from tests.flower_app import App, captured, entry, events

MATCH: list[dict[str, Any]] = [{"name": "inverting_gradients", "steps": 10}]
WRONG = [
    ({"lr": 0.02}, "train.lr", "0.1"),
    ({"momentum": 0.9}, "train.momentum", "0"),
    ({"optimizer": "adam"}, "train.optimizer", "sgd"),
    ({"mode": "eval"}, "train.mode", "train"),
    ({"weight_decay": 0.01}, "train.weight_decay", "0"),
    ({"local_epochs": 3}, "train.local_epochs", "2, as its witness saw"),
    ({"batch_size": 2}, "train.batch_size", "3, as its witness saw"),
    ({"loss": {"label_smoothing": 0.1}}, "train.loss", "label smoothing 0"),
]


@pytest.mark.parametrize(("declared", "field", "rather"), WRONG)
def test_a_wrong_declaration_is_named(
    tmp_path: Path, declared: dict[str, Any], field: str, rather: str
) -> None:
    app = App(epochs=2, witnessed=True)
    app.run(captured(app, tmp_path / "mine", **{"local_epochs": 2, **declared}), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=MATCH)
    found = entry(run, "inverting_gradients")
    assert found["verdict"] == "MIS-SPECIFIED"
    assert found["likely"]["field"] == field
    assert found["likely"]["rather"] == rather
    assert field in found["words"]
    assert any(field in words for words in events(run, "misdeclared"))
    assert field in run.report.read_text()

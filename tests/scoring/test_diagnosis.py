"""Diagnosis: the field that was declared wrongly is named, whichever it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedsim
from fedsim.audit.captured import bring_truths, settled
from fedsim.core.vault import Vault
from fedsim.scoring.diagnosis import Diagnosis, diagnose
from tests import flower_task as task
from tests.flower_app import App, captured, entry, events, updates

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


def loop(monkeypatch: pytest.MonkeyPatch, make: Any, before_step: Any = lambda model: None) -> None:
    """Have the app train by an optimiser of its own."""

    def train(model: Any, batches: Any, epochs: int, lr: float, momentum: float) -> float:
        optimizer = make(model.parameters())
        for images, labels in (batch for _ in range(epochs) for batch in batches):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            before_step(model)
            optimizer.step()
        return 1.0

    monkeypatch.setattr(task, "train", train)


def likely(root: Path, app: App, rounds: int = 1, **declared: Any) -> dict[str, Any]:
    app.run(captured(app, root, **declared), rounds)
    found = entry(fedsim.audit(root, attacks=MATCH), "inverting_gradients")
    assert found["verdict"] == "MIS-SPECIFIED"
    return found


def named(root: Path, app: App, **declared: Any) -> Diagnosis | None:
    """What explains the first update, without an audit."""
    app.run(captured(app, root, **declared), 1)
    run, spec = settled(root, attacks=MATCH)
    bring_truths(run, spec, [])
    observation = updates(run)[0]
    truth = Vault(run.vault).read(1, observation.client)
    return diagnose(observation, truth, torch.device("cpu"))


@pytest.mark.parametrize("norm", [1.0, 0.7])
def test_a_gradient_that_was_clipped_is_not_blamed_on_the_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: float
) -> None:
    def clip(model: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)

    loop(monkeypatch, lambda free: torch.optim.SGD(free, lr=0.1), clip)
    found = named(tmp_path / "mine", App(model=task.Plain, examples=3, witnessed=True))
    assert found is not None
    assert (found.field, found.rather) == ("train.clip", f"{norm:g}")


def test_what_leaves_as_much_unexplained_as_nothing_at_all_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam's steps are far smaller than those declared: whatever shrinks them comes closer."""
    loop(monkeypatch, lambda free: torch.optim.Adam(free, lr=0.001))
    assert named(tmp_path / "mine", App(model=task.Plain, witnessed=True)) is None


def test_adamw_as_torch_makes_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop(monkeypatch, lambda free: torch.optim.AdamW(free, lr=0.001))
    app = App(model=task.Plain, witnessed=True)
    found = named(tmp_path / "mine", app, optimizer="adam", lr=0.001)
    assert found is not None
    assert found.rather == "adamw and its weight decay of 0.01"


class Dropping(task.Plain):
    def forward(self, images: Any) -> Any:
        seen = torch.sigmoid(self.conv(images)).flatten(1)
        return self.fc(torch.nn.functional.dropout(seen, 0.3, self.training))


def test_coins_are_told_and_no_field_is_blamed(tmp_path: Path) -> None:
    found = likely(tmp_path / "mine", App(model=Dropping, witnessed=True))
    assert found["likely"] is None
    assert "tosses coins while it is trained (dropout)" in found["words"]


def test_what_is_wrong_in_some_rounds_alone_is_said_of_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def rate(free: Any) -> Any:
        calls.append(1)
        return torch.optim.SGD(free, lr=0.1 if len(calls) < 3 else 0.05)

    loop(monkeypatch, rate)
    found = likely(tmp_path / "mine", App(model=task.Plain, witnessed=True), rounds=2)
    assert "in round 2; 2 other updates came about as declared" in found["words"]


def test_a_second_fault_is_not_denied(tmp_path: Path) -> None:
    app = App(model=task.Plain, witnessed=True)
    found = named(tmp_path / "mine", app, batch_size=2, momentum=0.9)
    assert found is not None
    assert found.field == "train.batch_size"
    assert not found.holds
    assert "something else is wrong as well" in found.words

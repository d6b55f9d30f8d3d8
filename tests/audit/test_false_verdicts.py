"""A captured app whose declaration or directory lies: no verdict that the truth does not bear."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.captures.log import append_messages, read_head, read_messages, write_head
from fedsim.core.errors import RunError
from fedsim.core.run import observation_path
from tests import flower_task as task
from tests.flower_app import App, captured, entry, events, kinds, settled

MATCH: list[dict[str, Any]] = [{"name": "inverting_gradients", "steps": 2}]
GUESS: list[dict[str, Any]] = [{"name": "prior_only"}]


def unnormalised(batches: Any) -> Any:
    """As torchvision's ToTensor alone leaves them."""
    return [(images * 0.25 + 0.5, labels) for images, labels in batches]


@pytest.mark.parametrize(
    ("app", "declared", "field", "rather"),
    [
        (App(), {"mean": 0.0, "std": 1.0}, "data.mean and data.std", "others"),
        (App(wrap=unnormalised), {"mean": 0.5, "std": 0.5}, "data.mean and data.std", "none"),
        (App(), {"local_epochs": 5}, "train.local_epochs", "1"),
        (App(), {"batch_size": 8}, "train.batch_size", "3"),
    ],
)
def test_what_the_replay_cannot_tell_the_witness_does(
    tmp_path: Path, app: App, declared: dict[str, Any], field: str, rather: str
) -> None:
    app.model, app.witnessed = task.Plain, True
    app.run(captured(app, tmp_path / "mine", **declared), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=MATCH)
    found = entry(run, "inverting_gradients")
    assert found["verdict"] == "MIS-SPECIFIED"
    assert found["likely"]["field"] == field
    assert found["likely"]["rather"].startswith(rather)


def test_pictures_that_were_changed_in_places_are_of_their_normalisation(tmp_path: Path) -> None:
    """Patches erased by noise lie outside [0, 1], and the rest does not."""

    def erased(batches: Any) -> Any:
        found = [(images.clone(), labels) for images, labels in batches]
        for images, _ in found:
            images[:, :, :4, :4] = 9.0
        return found

    app = App(model=task.Plain, wrap=erased, witnessed=True)
    app.run(captured(app, tmp_path / "mine"), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=GUESS)
    assert entry(run, "prior_only")["canary"]["ok"]


def test_code_that_was_written_into_ones_own_capture_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "strangers_net.py").write_text("from tests.flower_task import Plain as Net\n")
    app = App(model=task.Plain)
    root = tmp_path / "mine"
    app.run(captured(app, root), 1)
    head = read_head(root)
    head.added = {"model": {"name": "strangers_net:Net"}}
    write_head(root, head)
    with pytest.raises(RunError, match="names code by import path"):
        fedsim.audit(root, attacks=GUESS)
    assert "strangers_net" not in sys.modules
    head.added = {}
    write_head(root, head)
    for said in (["model.name=strangers_net:Net"], []):  # one's own word is remembered
        run = fedsim.audit(root, *said, attacks=GUESS)
        assert run.spec.model.name == "strangers_net:Net"


def test_a_log_that_names_rounds_and_files_that_are_not_there_is_read_as_far_as_it_goes(
    tmp_path: Path,
) -> None:
    app = App(model=task.Plain)
    root = tmp_path / "mine"
    app.run(captured(app, root), 2)
    (first, second), _ = read_messages(root)
    observation_path(root / "observations", 2, 0).unlink()
    append_messages(root, second.model_copy(update={"round": 7}))
    append_messages(root, first.model_copy(update={"round": 10**9}))
    run = settled(root)
    assert [len(run.spec.cohort(round_)) for round_ in (1, 2, 7)] == [2, 1, 0]
    assert len(events(run, "update_lost")) == 3
    assert "damaged" in kinds(run)


def test_a_server_that_was_killed_leaves_what_it_had(tmp_path: Path) -> None:
    app = App(model=task.Plain, witnessed=True)
    root = tmp_path / "mine"
    app.run(captured(app, root), 2)
    lines = (root / "messages.jsonl").read_bytes().splitlines(keepends=True)
    (root / "messages.jsonl").write_bytes(lines[0] + lines[1][:40])
    head = read_head(root)
    head.finished = False
    write_head(root, head)
    run = fedsim.audit(root, attacks=GUESS)
    assert entry(run, "prior_only")["victims"] == 2
    assert entry(run, "prior_only")["canary"]["ok"]

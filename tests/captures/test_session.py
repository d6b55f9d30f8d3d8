"""Whatever happens in a run of an app, it ends well, and the capture says what is missing."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from flwr.serverapp.strategy import (
    FedAvg,
)
from torch import Tensor, nn

from fedsim.captures import session
from fedsim.captures.log import captured_elsewhere
from fedsim.captures.trouble import CaptureWarning
from fedsim.core.run import Run
from tests import flower_task as task
from tests.flower_app import App, bytes_of, captured, kinds, settled, updates


def test_a_client_that_raises_is_an_event(tmp_path: Path) -> None:
    def reply(client: int, round_: int, weights: Any, content: RecordDict) -> RecordDict:
        if client == 1 and round_ == 1:
            raise RuntimeError("no data here")
        return content

    app = App(model=task.Plain, reply=reply)
    plain = app.run(app.strategy(), 2)
    assert bytes_of(app.run(captured(app, tmp_path / "mine"), 2)) == bytes_of(plain)
    run = settled(tmp_path / "mine")
    assert len(updates(run)) == 3
    failed = [event for event in run.events() if event["kind"] == "client_failed"]
    assert "no data here" in failed[0]["message"]


def test_a_reply_without_metrics_is_kept_and_told(tmp_path: Path) -> None:
    def reply(client: int, round_: int, weights: Any, content: RecordDict) -> RecordDict:
        return RecordDict({"arrays": content["arrays"]})

    class Unweighted(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return [*replies][-1].content["arrays"], None

    app = App(model=task.Plain, reply=reply)
    app.run(captured(app, tmp_path / "mine", app.strategy(Unweighted)), 1)
    run = settled(tmp_path / "mine")
    assert len(updates(run)) == 2
    assert "no_examples" in kinds(run)


def test_a_reply_of_the_head_alone_is_a_part(tmp_path: Path) -> None:
    def reply(client: int, round_: int, weights: Any, content: RecordDict) -> RecordDict:
        arrays = {n: a for n, a in content["arrays"].items() if n.startswith("fc.")}
        return RecordDict({"arrays": ArrayRecord(arrays), "metrics": content["metrics"]})

    class Heads(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return (None, None) if list(replies) else None

    app = App(model=task.Plain, reply=reply)
    app.run(captured(app, tmp_path / "mine", app.strategy(Heads)), 1)
    run = settled(tmp_path / "mine")
    for seen in updates(run):
        assert set(seen.update.tensors) == {"fc.weight", "fc.bias"}
    assert "part_trained" in kinds(run)


def test_a_reply_of_another_shape_is_left_out(tmp_path: Path) -> None:
    def reply(client: int, round_: int, weights: Any, content: RecordDict) -> RecordDict:
        if client == 0:
            content["arrays"] = ArrayRecord(task.Plain(4).state_dict())
        return content

    class First(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            own = [r for r in replies if r.content["arrays"]["fc.bias"].shape == (10,)]
            return own[-1].content["arrays"], None

    app = App(model=task.Plain, reply=reply)
    app.run(captured(app, tmp_path / "mine", app.strategy(First)), 1)
    run = settled(tmp_path / "mine")
    assert len(updates(run)) == 1
    rejected = [event for event in run.events() if event["kind"] == "update_rejected"]
    assert "'conv.weight' is of shape (4, 3, 3, 3)" in rejected[0]["message"]


def test_a_model_that_changes_shape_is_kept_as_long_as_it_was_one(tmp_path: Path) -> None:
    class Growing(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            width = 8 if server_round < 2 else 12
            arrays = ArrayRecord(task.Plain(width).state_dict())
            return super().configure_train(server_round, arrays, config, grid)

    def load(model: Any, record: ArrayRecord) -> None:
        state = record.to_torch_state_dict()
        model.__init__(len(state["conv.weight"]))
        model.load_state_dict(state)

    app = App(model=task.Plain, load=load)
    app.run(captured(app, tmp_path / "mine", app.strategy(Growing)), 2)
    run = settled(tmp_path / "mine")
    assert {seen.round for seen in updates(run)} == {1}
    assert "shape_changed" in kinds(run)


def test_a_full_disk_is_a_warning_and_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App(model=task.Plain)
    plain = app.run(app.strategy(), 2)
    kept = session.save_tensors

    def full(path: Path, *rest: Any) -> None:
        if "client-0001" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        kept(path, *rest)

    monkeypatch.setattr(session, "save_tensors", full)
    with pytest.warns(CaptureWarning, match="No space left on device"):
        seen = app.run(captured(app, tmp_path / "mine"), 2)
    assert bytes_of(seen) == bytes_of(plain)
    monkeypatch.undo()
    run = settled(tmp_path / "mine")
    assert [o.client for o in updates(run)] == [0, 0]
    assert "capture_failed" in kinds(run)


def test_a_folder_that_cannot_be_made_costs_the_capture_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    app = App(model=task.Plain)
    plain = app.run(app.strategy(), 1)
    with pytest.warns(CaptureWarning, match="the capture cannot begin"):
        seen = app.run(captured(app, tmp_path / "file" / "mine"), 1)
    assert bytes_of(seen) == bytes_of(plain)


def test_a_second_run_goes_into_a_directory_of_its_own(tmp_path: Path) -> None:
    app = App(model=task.Plain)
    app.run(captured(app, tmp_path / "mine"), 1)
    before = sorted(path.name for path in (tmp_path / "mine").rglob("*"))
    with pytest.warns(CaptureWarning, match="captured in '.*mine-2'"):
        app.run(captured(app, tmp_path / "mine"), 1)
    assert sorted(path.name for path in (tmp_path / "mine").rglob("*")) == before
    assert len(updates(settled(tmp_path / "mine-2"))) == 2
    assert captured_elsewhere("mine-2") == tmp_path / "mine-2"


def test_a_client_that_was_sent_other_weights_is_attacked_on_those(tmp_path: Path) -> None:
    class Personal(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            messages = list(super().configure_train(server_round, arrays, config, grid))
            state = arrays.to_torch_state_dict()
            state["fc.bias"] = state["fc.bias"] + 1
            own = RecordDict({"arrays": ArrayRecord(state), "config": config})
            messages[-1].content = own
            self.changed = messages[-1].metadata.dst_node_id
            return messages

    app = App(model=task.Plain)
    app.run(captured(app, tmp_path / "mine", app.strategy(Personal)), 1)
    run = settled(tmp_path / "mine")
    one, other = updates(run)
    apart = other.weights["fc.bias"] - one.weights["fc.bias"]
    torch.testing.assert_close(apart.abs(), torch.ones(task.CLASSES))
    assert torch.equal(other.weights["fc.weight"], one.weights["fc.weight"])


class Grey(nn.Module):
    """A network that looks at grey pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, stride=2)
        self.fc = nn.Linear(4 * (task.SIDE // 2) ** 2, task.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.conv(images.mean(1, keepdim=True)).flatten(1))
        return logits


def test_an_app_of_grey_pictures_is_told_while_it_runs(tmp_path: Path) -> None:
    app = App(model=Grey)
    with pytest.warns(CaptureWarning, match="grey pictures are not audited"):
        app.run(captured(app, tmp_path / "mine"), 1)
    assert "grey" in kinds(Run(tmp_path / "mine"))

"""The audit of a captured app: what leaked, where there is truth, and what was declared wrongly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import fedsim
from fedsim.cli import app as command
from fedsim.core.errors import RunError, SpecError
from fedsim.core.run import Run
from tests import flower_task as task
from tests.flower_app import App, captured, entry, events

GUESS: list[dict[str, Any]] = [{"name": "prior_only"}]
MATCH: list[dict[str, Any]] = [{"name": "inverting_gradients", "steps": 10}]


def vit(**more: Any) -> Any:
    import timm

    options = {"img_size": task.SIDE, "patch_size": 4, "depth": 2, "embed_dim": 96, "num_heads": 3}
    return timm.create_model("vit_tiny_patch16_224", num_classes=task.CLASSES, **options, **more)


VIT = {
    "name": "vit_tiny_patch16_224",
    "options": {"patch_size": 4, "depth": 2, "embed_dim": 96, "num_heads": 3},
}


def test_one_picture_behind_one_step_of_a_vit_leaks_exactly(tmp_path: Path) -> None:
    app = App(model=vit, examples=1, batch_size=1, witnessed=True)
    app.run(captured(app, tmp_path / "mine", model=VIT, batch_size=1), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=[{"name": "patch_solve"}])
    found = entry(run, "patch_solve")
    assert found["verdict"] == "LEAKS"
    assert found["canary"]["ok"]
    assert (run.scores[run.scores["attack"] == "patch_solve"]["psnr"] > 60).all()
    assert run.report.is_file()
    assert "witness" not in run.report.read_text().partition("</h1>")[0]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_local_epochs_are_replayed_to_the_last_bit(tmp_path: Path, momentum: float) -> None:
    app = App(epochs=3, momentum=momentum, examples=7, witnessed=True)
    declared = {"local_epochs": 3, "momentum": momentum}
    app.run(captured(app, tmp_path / "mine", **declared), 2)
    run = fedsim.audit(tmp_path / "mine", attacks=MATCH)
    found = entry(run, "inverting_gradients")
    assert found["canary"]["ok"]
    assert found["canary"]["worst"] < 1e-5
    assert found["verdict"] in ("NOT RECOVERED", "PARTIAL")
    assert found["victims"] == 4
    truths = run.scores[run.scores["attack"] == "inverting_gradients"]
    assert (
        sorted(truths[truths["client"] == 0]["label_true"])[:7]
        == sorted([*task.pictures(0, 7)[1].tolist(), *task.pictures(0, 7)[1].tolist()])[:7]
    )


def test_dictionaries_are_a_truth_as_well(tmp_path: Path) -> None:
    def as_dicts(batches: Any) -> list[dict[str, Tensor]]:
        return [{"img": images, "label": labels} for images, labels in batches]

    app = App(wrap=as_dicts, witnessed=True)
    app.run(captured(app, tmp_path / "mine"), 1)
    assert entry(fedsim.audit(tmp_path / "mine", attacks=GUESS), "prior_only")["canary"]["ok"]


def test_without_a_witness_there_are_reconstructions_and_no_scores(tmp_path: Path) -> None:
    app = App(model=vit, examples=1, batch_size=1)
    app.run(captured(app, tmp_path / "mine", model=VIT, batch_size=1), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=[{"name": "patch_solve"}])
    found = entry(run, "patch_solve")
    assert found["verdict"] == "NOT SCORED"
    assert (found["made"], found["labels_read"]) == (2, 2)
    assert run.scores.empty
    assert not events(run, "not_scored")
    page = run.report.read_text()
    assert "Reconstructions without scores: no client had a witness." in page
    assert page.count('alt="Reconstruction of round 1') == 4  # of the attack and of the baseline
    assert "label read" in page


def test_a_declaration_that_was_wrong_can_be_mended(tmp_path: Path) -> None:
    app = App(epochs=2, witnessed=True)
    app.run(captured(app, tmp_path / "mine", local_epochs=2, lr=0.5), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=MATCH)
    assert entry(run, "inverting_gradients")["verdict"] == "MIS-SPECIFIED"
    run = fedsim.audit(tmp_path / "mine", "train.lr=0.1", attacks=MATCH)
    found = entry(run, "inverting_gradients")
    assert found["canary"]["ok"]
    assert found["verdict"] != "MIS-SPECIFIED"


def test_a_loader_that_is_left_early_is_replayed_without_the_batch_it_fetched(
    tmp_path: Path,
) -> None:
    class Early:
        """As `for step, batch in enumerate(loader): if step == 2: break; train(batch)`."""

        def __init__(self, batches: Any):
            self.batches = batches

        def __iter__(self) -> Any:
            for step, batch in enumerate(self.batches):
                if step == 2:
                    return
                yield batch

    class Fetching(App):
        def client_app(self) -> Any:
            witness = fedsim.witness
            fedsim.witness = lambda batches, context: Early(  # type: ignore[assignment]
                witness(batches, context)
            )
            self.undo = lambda: setattr(fedsim, "witness", witness)
            return super().client_app()

    app = Fetching(examples=8, batch_size=2, witnessed=True)
    try:
        app.run(captured(app, tmp_path / "mine", local_epochs=None, local_steps=2, batch_size=2), 1)
    finally:
        app.undo()
    found = entry(fedsim.audit(tmp_path / "mine", attacks=GUESS), "prior_only")
    assert found["canary"]["ok"]
    assert found["images"] == 8  # of two clients, two steps of two pictures


def test_two_loaders_in_one_round_are_no_truth(tmp_path: Path) -> None:
    def twice(batches: Any) -> Any:
        other = fedsim.witness(task.loader(5, 4, 2), CONTEXTS[-1])
        list(other)
        return batches

    app = App(witnessed=True, wrap=twice)
    CONTEXTS.clear()

    class Telling(App):
        pass

    import fedsim.captures.witness as room

    keep = room.Keeper.of

    def of(context: Any, *rest: Any) -> Any:
        CONTEXTS.append(context)
        return keep(context, *rest)

    first = App(witnessed=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room.Keeper, "of", staticmethod(of))
        first.run(captured(first, tmp_path / "one"), 1)
        app.run_id = CONTEXTS[-1].run_id
        app.run(captured(app, tmp_path / "mine"), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=MATCH)
    assert any("several loaders" in words for words in events(run, "truth_unbound"))


CONTEXTS: list[Any] = []


def test_the_truth_of_a_witness_elsewhere_is_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSIM_WITNESS", str(tmp_path / "elsewhere"))
    app = App(witnessed=True)
    app.run(captured(app, tmp_path / "mine"), 1)
    from fedsim.captures.witness import settle_witnesses

    settle_witnesses()
    monkeypatch.delenv("FEDSIM_WITNESS")
    run = fedsim.audit(tmp_path / "mine", attacks=MATCH)
    assert entry(run, "inverting_gradients")["verdict"] == "NOT SCORED"
    told = CliRunner().invoke(
        command,
        ["audit", str(tmp_path / "mine"), "--vault", str(tmp_path / "elsewhere"), "--json"],
    )
    assert told.exit_code == 0, told.output
    assert entry(Run.open(tmp_path / "mine"), "inverting_gradients")["canary"]["ok"]


def test_an_audit_can_be_made_elsewhere(tmp_path: Path) -> None:
    app = App(witnessed=True)
    app.run(captured(app, tmp_path / "mine"), 1)
    before = sorted(path.name for path in (tmp_path / "mine").rglob("*"))
    run = fedsim.audit(tmp_path / "mine", attacks=MATCH, output=tmp_path / "other")
    assert run.root == tmp_path / "other"
    assert entry(run, "inverting_gradients")["canary"]["ok"]
    assert sorted(path.name for path in (tmp_path / "mine").rglob("*")) == before


def test_the_command_takes_a_directory_an_attack_and_a_threat(tmp_path: Path) -> None:
    app = App(model=vit, examples=1, batch_size=1, witnessed=True)
    app.run(captured(app, tmp_path / "mine", model=VIT, batch_size=1), 1)
    root = str(tmp_path / "mine")
    told = CliRunner().invoke(
        command, ["audit", root, "--attack", "patch_solve", "--attack", "row_space", "--json"]
    )
    assert told.exit_code == 0, told.output
    summary = json.loads(told.stdout)
    assert [e["attack"] for e in summary["verdicts"]] == ["patch_solve", "row_space", "prior_only"]
    assert summary["verdicts"][0]["verdict"] == "LEAKS"
    told = CliRunner().invoke(command, ["audit", root, "--threat", "B", "--json"])
    assert json.loads(told.stdout)["threat"] == "B"
    told = CliRunner().invoke(command, ["lint", root, "threat=C", "--json"])
    assert told.exit_code == 5, told.output  # one picture behind a step of a ViT: certain


def test_a_capture_that_is_not_here_is_found_by_its_name(tmp_path: Path) -> None:
    app = App(model=task.Plain)
    app.run(captured(app, tmp_path / "runs" / "mine"), 1)
    with pytest.raises(RunError, match=f"one of that name is in '{tmp_path}/runs/mine'"):
        fedsim.audit("runs/mine")


def test_what_nobody_declared_is_asked_for_by_name(tmp_path: Path) -> None:
    app = App(model=task.Plain)
    left = {"lr": None, "optimizer": None, "local_epochs": None, "batch_size": None}
    app.run(captured(app, tmp_path / "mine", **left), 1)
    with pytest.raises(SpecError, match=r"train.optimizer=..., train.lr=..., train.local_epochs"):
        fedsim.audit(tmp_path / "mine")


def test_importing_fedsim_changes_nothing_of_their_flower(tmp_path: Path) -> None:
    code = (
        "import os, sys; before = dict(os.environ); import fedsim; "
        "heavy = {'torch', 'pandas', 'timm', 'flwr', 'ray'} & set(sys.modules); "
        "fedsim.capture; fedsim.witness; "
        "print(sorted(heavy), {k for k in os.environ if os.environ[k] != before.get(k)}, "
        "{'timm', 'pandas'} & set(sys.modules))"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("FLWR_", "RAY_"))}
    found = subprocess.run(
        [sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True
    )
    assert found.stdout == "[] set() set()\n"


def test_the_report_of_ones_own_capture_can_be_written_again(tmp_path: Path) -> None:
    app = App(witnessed=True)
    app.run(captured(app, tmp_path / "mine"), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=GUESS)
    run.report.unlink()
    for words in (["report", str(run.root)], ["audit", "--resume", str(run.root)]):
        told = CliRunner().invoke(command, words)
        assert told.exit_code == 0, told.output
        assert run.report.is_file()


def test_a_capture_of_somebody_else_is_trusted_by_word_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App(witnessed=True)
    app.run(captured(app, tmp_path / "mine"), 1)
    monkeypatch.setenv("FEDSIM_VAULT_KEYS", str(tmp_path / "other keys"))
    with pytest.raises(RunError, match="names code by import path"):
        fedsim.audit(tmp_path / "mine")
    (tmp_path / "mine/vault/key.id").unlink()
    run = fedsim.audit(tmp_path / "mine", attacks=GUESS, trust=True)
    assert entry(run, "prior_only")["verdict"] == "BASELINE"


class Frozen(nn.Module):
    """A backbone that nobody trains, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = task.Plain()
        self.fc = nn.Linear(task.CLASSES, task.CLASSES)
        self.body.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(torch.tanh(self.body(images)))
        return logits


def test_a_head_alone_is_replayed_as_what_it_is(tmp_path: Path) -> None:
    app = App(model=Frozen, witnessed=True)
    app.run(captured(app, tmp_path / "mine", model=Frozen), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=GUESS)
    assert entry(run, "prior_only")["canary"]["ok"]


def test_a_loop_that_never_ends_is_not_said_to_have_had_no_witness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []

    def train(model: Any, batches: Any, *rest: Any) -> float:
        held.append(iter(batches))
        images, labels = next(held[-1])
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return 1.0

    monkeypatch.setattr(task, "train", train)
    app = App(model=task.Plain, witnessed=True)
    app.run(captured(app, tmp_path / "mine", local_epochs=None, local_steps=1), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=MATCH)
    found = entry(run, "inverting_gradients")
    assert found["verdict"] == "NOT SCORED"
    assert "no witness tells the truth" in found["words"]
    page = run.report.read_text()
    assert "no client had a witness" not in page
    assert "2 updates, 6 pictures made of them" in page


def test_measuring_with_gradients_on_is_told_from_the_steps_that_were_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = task.train

    def train(model: Any, batches: Any, *rest: Any) -> float:
        for images, _ in batches:
            model(images)
        return plain(model, batches, *rest)

    monkeypatch.setattr(task, "train", train)
    app = App(model=task.Plain, witnessed=True)
    app.run(captured(app, tmp_path / "mine", local_epochs=None, local_steps=2), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=GUESS)
    assert entry(run, "prior_only")["canary"]["ok"]


class Wide(task.Plain):
    """Takes pictures of any size."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(nn.functional.adaptive_avg_pool2d(images, task.SIDE))


def test_pictures_of_another_size_are_told_before_anything_is_attacked(tmp_path: Path) -> None:
    app = App(model=Wide, witnessed=True)
    app.run(captured(app, tmp_path / "mine", image_size=32), 1)
    with pytest.raises(SpecError, match=r"16 x 16, .* declare data\.image_size=16"):
        fedsim.audit(tmp_path / "mine", attacks=GUESS)

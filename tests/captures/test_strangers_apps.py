"""Apps that do something usual which nobody thought of: they train as before, and the truth is
theirs or none."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from torch.utils.data import DataLoader

import fedsim
from fedsim.captures import witness as room
from fedsim.captures.batches import seen_in
from fedsim.captures.trouble import CaptureWarning
from fedsim.captures.witness import settle_witnesses
from fedsim.core.errors import SpecError
from fedsim.core.run import Run
from tests import flower_task as task
from tests.captures.test_witness import context, kept
from tests.flower_app import App, captured, entry, events, kinds, settled, updates

GUESS: list[dict[str, Any]] = [{"name": "prior_only"}]
IMAGES = torch.rand(3, 3, 4, 4)


class Trains:
    """The `task` module with a loop of the app's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loop: Any):
        plain = task.train
        monkeypatch.setattr(task, "train", lambda *given: loop(plain, *given))


def test_an_iterator_stays_one(tmp_path: Path) -> None:
    batches = fedsim.witness(iter(task.loader(0, 4, 2)), context(), vault=tmp_path)
    first, second = next(batches), next(batches)
    assert next(batches, None) is None
    (one,) = kept(tmp_path)
    assert torch.equal(one.loose, torch.cat([first[0], second[0]]))


def test_a_witnessed_loader_is_of_the_class_that_it_was(tmp_path: Path) -> None:
    loader = fedsim.witness(task.loader(0, 4, 2), context(), vault=tmp_path)
    assert isinstance(loader, DataLoader)
    loader.note = 1
    del loader.note
    assert not hasattr(loader, "note")


def test_a_copy_of_a_witnessed_loader_has_a_witness_of_its_own(tmp_path: Path) -> None:
    loader = fedsim.witness([(IMAGES, torch.arange(3))], context(), vault=tmp_path)
    for one in (loader, copy.copy(loader), copy.deepcopy(loader)):
        assert len(list(one)) == 1
    passes = kept(tmp_path)
    assert [len(passes), len({one.about.source for one in passes})] == [3, 2]


def test_a_strategy_can_be_copied_while_another_one_calls_it(tmp_path: Path) -> None:
    app = App(model=task.Plain)
    inner = captured(app, tmp_path / "mine")
    app.run(DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 1000.0, app.clients), 1)
    assert copy.deepcopy(inner).fraction_train == 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("switched", ["around the loop", "for each batch"])
def test_measuring_on_the_training_pictures_is_not_learning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switched: str
) -> None:
    def loop(plain: Any, model: Any, batches: Any, *rest: Any) -> Any:
        loss = plain(model, batches, *rest)
        model.eval()
        with torch.set_grad_enabled(switched == "for each batch"):
            for images, _ in batches:
                with torch.no_grad():
                    model(images)
        return loss

    Trains(monkeypatch, loop)
    app = App(witnessed=True)
    app.run(captured(app, tmp_path / "mine"), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=GUESS)
    assert entry(run, "prior_only")["canary"]["ok"]


def test_what_clients_are_told_one_by_one_is_not_inferred_for_all(tmp_path: Path) -> None:
    class Each(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            for at, message in enumerate(
                super().configure_train(server_round, arrays, config, grid)
            ):
                own = ConfigRecord({**config, "lr": 0.1 * (at + 1), "local-epochs": 1})
                message.content = RecordDict({"arrays": arrays, "config": own})
                yield message

    app = App(model=task.Plain)
    root = tmp_path / "mine"
    app.run(captured(app, root, app.strategy(Each), lr=None, local_epochs=None), 2)
    with pytest.raises(SpecError, match=r"declare train\.lr=\.\.\., here"):
        settled(root)
    assert events(Run(root), "config_differs") == [
        "not every client is told the same 'lr': it is not inferred"
    ]


def test_weights_in_whole_numbers_are_no_update(tmp_path: Path) -> None:
    def reply(client: int, round_: int, weights: Any, content: RecordDict) -> RecordDict:
        if client == 0:
            state = content["arrays"].to_torch_state_dict()
            content["arrays"] = ArrayRecord({n: (t * 100).char() for n, t in state.items()})
        return content

    class Takes(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return (None, None) if list(replies) else None

    app = App(model=task.Plain, reply=reply)
    app.run(captured(app, tmp_path / "mine", app.strategy(Takes)), 1)
    run = settled(tmp_path / "mine")
    assert len(updates(run)) == 1
    assert "is of int8, and float32 was sent" in events(run, "update_rejected")[0]


def test_a_folder_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = App(model=task.Plain, witnessed=True)
    app.run(captured(app, Path("läufe/каталог 1")), 1)
    run = fedsim.audit("läufe/каталог 1", attacks=GUESS)
    assert entry(run, "prior_only")["canary"]["ok"]


def test_accumulated_gradients_are_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop(plain: Any, model: Any, batches: Any, epochs: int, lr: float, momentum: float) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for at, (images, labels) in enumerate(batches, start=1):
            (torch.nn.functional.cross_entropy(model(images), labels) / 2).backward()
            if at % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        return 1.0

    Trains(monkeypatch, loop)
    app = App(model=task.Plain, examples=8, batch_size=2, witnessed=True)
    app.run(captured(app, tmp_path / "mine", batch_size=2, accumulate=2), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=GUESS)
    assert entry(run, "prior_only")["canary"]["ok"]


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (torch.eye(5).long()[[4, 0, 2]], [4, 0, 2]),
        (torch.tensor([[1.0], [0.0], [1.0]]), [1, 0, 1]),
        (torch.tensor([3.0, 1.0, 0.0]), [3, 1, 0]),
        (torch.tensor([3, 1, 0], dtype=torch.uint8), [3, 1, 0]),
    ],
)
def test_classes_may_be_written_in_other_numbers(labels: Any, classes: list[int]) -> None:
    assert seen_in((IMAGES, labels)).labels.tolist() == classes


@pytest.mark.parametrize(
    "batch",
    [
        (IMAGES, torch.tensor([0.5, 1.0, 2.0])),  # of a regression
        (IMAGES, torch.tensor([[1, 1], [0, 1], [1, 0]])),  # several classes of one picture
        (IMAGES, torch.tensor([-1, 0, 1])),
        (torch.rand(3, 16, 16, 3), torch.arange(3)),  # channels last
    ],
)
def test_what_is_no_class_and_no_picture_is_told(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"its (labels|pictures)"):
        seen_in(batch)


def test_pictures_of_another_shape_cost_the_truth_alone(tmp_path: Path) -> None:
    def wrap(batches: Any) -> Any:
        return [(images[:, :, :8], labels) for images, labels in batches]

    class Padded(task.Plain):
        def forward(self, images: Any) -> Any:
            return super().forward(torch.cat([images, images], 2)[:, :, : task.SIDE])

    app = App(model=Padded, wrap=wrap, witnessed=True)
    app.run(captured(app, tmp_path / "mine", model=task.Plain), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=GUESS)
    assert "canary_failed" in kinds(run)


def test_labels_that_the_model_has_no_class_for_cost_the_canary_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop(plain: Any, model: Any, batches: Any, *rest: Any) -> Any:
        class Shifted:
            def __iter__(self) -> Iterator[Any]:
                for images, labels in batches:
                    yield images, labels - 90

        return plain(model, Shifted(), *rest)

    Trains(monkeypatch, loop)
    app = App(
        model=task.Plain,
        wrap=lambda found: [(i, labels + 90) for i, labels in found],
        witnessed=True,
    )
    app.run(captured(app, tmp_path / "mine"), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=GUESS)
    assert any("out of bounds" in words for words in events(run, "canary_failed"))


def test_a_client_that_trained_nothing_is_left_out_and_told(tmp_path: Path) -> None:
    def reply(client: int, round_: int, weights: Any, content: RecordDict) -> RecordDict:
        if client == 0:
            content["arrays"] = weights
        return content

    app = App(model=task.Plain, reply=reply, witnessed=True)
    app.run(captured(app, tmp_path / "mine"), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=GUESS)
    assert entry(run, "prior_only")["victims"] == 1
    assert entry(run, "prior_only")["canary"]["ok"]
    assert "sent back what it was sent" in events(run, "nothing_trained")[0]


def test_a_client_that_claims_more_than_there_can_be_is_left_out(tmp_path: Path) -> None:
    def reply(client: int, round_: int, weights: Any, content: RecordDict) -> RecordDict:
        if client == 0:
            content["metrics"] = MetricRecord({"train_loss": float("nan"), "num-examples": 10**12})
        return content

    app = App(model=task.Plain, reply=reply)
    app.run(captured(app, tmp_path / "mine"), 1)
    run = settled(tmp_path / "mine")
    assert len(run.spec.cohort(1)) == 1
    assert "1000000000000 examples" in events(run, "update_rejected")[0]


@pytest.mark.parametrize("kind", [torch.float16, torch.float64])
def test_uploads_in_other_numbers_are_replayed_in_those(tmp_path: Path, kind: Any) -> None:
    def reply(client: int, round_: int, weights: Any, content: RecordDict) -> RecordDict:
        state = content["arrays"].to_torch_state_dict()
        own = {n: t.to(kind) if t.is_floating_point() else t for n, t in state.items()}
        return RecordDict({"arrays": ArrayRecord(own), "metrics": content["metrics"]})

    class Takes(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return (None, None) if list(replies) else None

    app = App(reply=reply, witnessed=True)
    app.run(captured(app, tmp_path / "mine", app.strategy(Takes)), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=GUESS)
    assert entry(run, "prior_only")["canary"]["ok"]


def test_a_directory_that_another_server_took_first_is_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    root.mkdir()
    listed = Path.iterdir

    def late(path: Path) -> Any:
        """As it was before the other server began."""
        return iter(()) if path == root else listed(path)

    app = App(model=task.Plain)
    with Run(root).locked(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "iterdir", late)
        with pytest.warns(CaptureWarning, match="mine-2"):
            app.run(captured(app, root), 1)
    assert [path.name for path in root.iterdir()] == ["run.lock"]
    assert len(updates(settled(tmp_path / "mine-2"))) == 2


def test_a_pass_that_could_not_be_written_is_known_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(one: Any, vault: Any, write: Any = room.Pass.write) -> None:
        if one.about.rows and one.about.number == 2:
            raise OSError(28, "No space left on device")
        write(one, vault)

    monkeypatch.setattr(room.Pass, "write", full)
    loader = fedsim.witness(task.loader(0, 4, 2), context(), vault=tmp_path)
    with pytest.warns(CaptureWarning, match="could not keep a pass"):
        _twice(loader)
    first, second = kept(tmp_path)
    assert first.about.lost is None
    assert "No space left" in str(second.about.lost)


def _twice(loader: Any) -> None:
    for _ in range(2):
        list(loader)
        settle_witnesses()


def test_no_coin_of_theirs_is_tossed(tmp_path: Path) -> None:
    import random

    import numpy as np

    def coins() -> tuple[Any, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    app = App(model=task.Plain)
    found = []
    for watched in (False, True):
        app.witnessed = watched
        strategy = captured(app, tmp_path / "mine") if watched else app.strategy()
        random.seed(1)
        np.random.seed(1)
        app.run(strategy, 1)  # seeds torch
        settle_witnesses()
        found.append(coins()[1:])  # Flower tosses Python's own to sample clients
    assert found[0] == found[1]

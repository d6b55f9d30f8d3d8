"""An app that knows nothing of fedsim, in this process: a server, clients, and what each may do
otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from flwr.supercore.task_identity import TaskIdentity

import fedsim
from fedsim.captures.settling import Wanted, settle
from fedsim.core.observation import Observation, read_observation
from fedsim.core.run import Run, list_observations
from fedsim.federation.grids import InlineGrid
from tests import flower_task as task

Reply = Callable[[int, int, dict[str, Any], RecordDict], RecordDict]  # client, round, weights


@dataclass
class App:
    """The app: what a client replies can be changed, and so can its loader."""

    model: Callable[[], Any] = task.Net
    clients: int = 2
    examples: int = 6
    batch_size: int = 3
    epochs: int = 1
    lr: float = 0.1
    momentum: float = 0.0
    witnessed: bool = False
    wrap: Callable[[Any], Any] = lambda batches: batches
    reply: Reply = lambda client, round_, weights, content: content
    arrays: Callable[[dict[str, Any]], ArrayRecord] = ArrayRecord
    load: Callable[[Any, ArrayRecord], None] = field(
        default=lambda model, record: model.load_state_dict(record.to_torch_state_dict())
    )
    keys: tuple[str, str] = ("arrays", "config")
    mods: list[Any] = field(default_factory=list)
    run_id: int = 0

    def client_app(self) -> ClientApp:
        app = ClientApp(mods=self.mods)

        @app.train()
        def train(message: Message, context: Context) -> Message:
            client = int(context.node_config["partition-id"])
            record = message.content[self.keys[0]]
            round_ = int(message.content[self.keys[1]]["server-round"])
            model = self.model()
            self.load(model, record)
            batches = self.wrap(task.loader(client, self.examples, self.batch_size))
            size = len(batches.dataset) if hasattr(batches, "dataset") else self.examples
            if self.witnessed:
                batches = fedsim.witness(batches, context)
            loss = task.train(model, batches, self.epochs, self.lr, self.momentum)
            content = RecordDict(
                {
                    self.keys[0]: self.arrays(model.state_dict()),
                    "metrics": MetricRecord({"train_loss": loss, "num-examples": size}),
                }
            )
            content = self.reply(client, round_, record, content)
            return Message(content, reply_to=message)

        @app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            metrics = MetricRecord({"eval_loss": 1.0, "num-examples": 2})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

        return app

    def strategy(self, kind: type[Strategy] = FedAvg, **options: Any) -> Strategy:
        keys = {"arrayrecord_key": self.keys[0], "configrecord_key": self.keys[1]}
        sampling = {"min_train_nodes": self.clients, "min_available_nodes": self.clients}
        return kind(**{**keys, **sampling, "min_evaluate_nodes": self.clients, **options})

    def run(self, strategy: Strategy, rounds: int = 1, **more: Any) -> Result:
        """Every round, from the weights that seed 0 gives."""
        torch.manual_seed(0)
        initial = self.arrays(self.model().state_dict())
        grid = InlineGrid(self.client_app(), self.clients)
        run_id = self.run_id or time.time_ns()  # as Flower: another one every time
        for context in grid.contexts.values():
            context.run_id = run_id
        with _task_of(run_id):
            return strategy.start(
                grid=grid, initial_arrays=initial, num_rounds=rounds, timeout=60, **more
            )


@contextmanager
def _task_of(run_id: int) -> Iterator[None]:
    """Messages that are made within are of this run."""
    before, TaskIdentity.run_id = TaskIdentity.run_id, run_id
    try:
        yield
    finally:
        TaskIdentity.run_id = before


DECLARED: dict[str, Any] = {
    "image_size": task.SIDE,
    "mean": task.MEAN,
    "std": task.STD,
    "classes": task.CLASSES,
    "batch_size": 3,
    "local_epochs": 1,
    "optimizer": "sgd",
    "lr": 0.1,
}


def captured(app: App, root: Path, strategy: Strategy | None = None, **declared: Any) -> Strategy:
    """The app's strategy, captured."""
    named = {"model": app.model, **DECLARED, **declared}
    return fedsim.capture(strategy or app.strategy(), root, **named)


def bytes_of(result: Result) -> dict[str, bytes]:
    return {name: array.data for name, array in result.arrays.items()}


def settled(root: Path, *overrides: str) -> Run:
    """The capture as a run."""
    run = Run(root)
    settle(run, Wanted.of(None, overrides))
    return run


def updates(run: Run) -> list[Observation]:
    return [read_observation(path) for path in list_observations(run.observations)]


def kinds(run: Run) -> set[str]:
    return {event["kind"] for event in run.events()}


def events(run: Run, kind: str) -> list[str]:
    return [event["message"] for event in run.events() if event["kind"] == kind]


def entry(run: Run, attack: str) -> dict[str, Any]:
    """What the summary says of an attack."""
    return next(e for e in run.summary["verdicts"] if e["attack"] == attack)

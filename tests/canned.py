"""A federation whose clients answer as they are told to, in a time that nobody has to wait for; and
what the standard suite leaves in a run, for those who read it."""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message, MessageType, RecordDict
from flwr.app.error import Error
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedsim.campaign.plan import Plan, prepare
from fedsim.core import wire
from fedsim.core.files import write_json
from fedsim.core.learning import Update
from fedsim.core.run import Run
from fedsim.core.spec import Spec
from fedsim.federation.admission import form_of
from fedsim.federation.aggregation import create_strategy
from fedsim.federation.pace import FLOOR, Pace
from fedsim.federation.strategy import AdversarialStrategy
from tests.conftest import small_spec

CLASSES = 3
SILENT = float("inf")  # a delay
Answer = RecordDict | Error
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # messages ask for them


@dataclass
class FakeClock:
    """A clock that goes on when somebody sleeps, and only then."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float, /) -> None:
        self.now += seconds


@dataclass
class CannedGrid(Grid):
    """Nodes 1, 2, ... are clients 0, 1, ...; ``answers`` says what a client replies to a kind of
    question, honestly where nothing is said; ``delays`` after how many seconds."""

    clients: int
    plan: Plan
    answers: dict[tuple[int, str], Callable[[RecordDict], Answer]] = field(default_factory=dict)
    delays: dict[tuple[int, str], float] = field(default_factory=dict)
    usually: float = 1.0  # the delay of all others
    clock: FakeClock = field(default_factory=FakeClock)
    asked: list[tuple[int, str, float]] = field(default_factory=list)  # client, kind, when

    def __post_init__(self) -> None:
        self.waiting: dict[str, tuple[Message, float]] = {}
        self.nodes = list(range(1, self.clients + 1))

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = []
        for message in messages:
            name = uuid.uuid4().hex
            message.metadata.__dict__["_message_id"] = name
            client, kind = message.metadata.dst_node_id - 1, message.metadata.message_type
            self.asked.append((client, kind, self.clock.now))
            self.waiting[name] = (
                message,
                self.clock.now + self.delays.get((client, kind), self.usually),
            )
            pushed.append(name)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        for name in list(message_ids):
            question, ready = self.waiting.get(name, (None, 0.0))
            if question is None or self.clock.now < ready:
                continue
            client, kind = question.metadata.dst_node_id - 1, question.metadata.message_type
            honest = self.honest(client, kind)
            answer = self.answers.get((client, kind), lambda content: content)(honest)
            del self.waiting[name]
            yield Message(answer, reply_to=question)

    def honest(self, client: int, kind: str) -> RecordDict:
        if kind == MessageType.QUERY:
            return wire.introduction(client)
        if kind == MessageType.EVALUATE:
            return wire.evaluated(wire.Evaluation(4, 1.5, 0.25))
        return honest_upload(self.plan, client)


_FORMS: dict[int, tuple[Plan, wire.Form]] = {}  # a model is built for each


def form_for(plan: Plan) -> wire.Form:
    """What the clients of a plan upload."""
    if id(plan) not in _FORMS:
        _FORMS[id(plan)] = plan, form_of(plan.public)
    return _FORMS[id(plan)][1]


def honest_upload(plan: Plan, client: int) -> RecordDict:
    """What an honest client might upload: of the right form, and small numbers."""
    coin = torch.Generator().manual_seed(client)
    form = form_for(plan)
    tensors = {n: torch.randn(b.shape, generator=coin) / 100 for n, b in form.tensors.items()}
    buffers = {
        n: torch.ones(b.shape, dtype=getattr(torch, b.dtypes[0])) for n, b in form.buffers.items()
    }
    batch = plan.spec.train.batch_size
    return wire.upload(Update(plan.public.protocol.upload, tensors, buffers, batch, 1.0))


@functools.cache
def canned_plan(*overrides: str) -> Plan:
    """A tiny model and clients whose data nobody has."""
    return prepare(canned_spec(*overrides), CLASSES, willing=True)


def canned_spec(*overrides: str) -> Spec:
    return small_spec(
        "data.clients=4",
        "model.options={patch_size: 16, depth: 1, embed_dim: 12, num_heads: 2}",
        "train={rounds: 1, lr: 0.05, evaluate: false}",
        *overrides,
    )


def federated(
    plan: Plan, grid: CannedGrid, root: Path, *, deployed: bool = True, **more: Any
) -> Run:
    """The rounds of a plan on a canned grid."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    run = Run.create(root, plan.spec, deployed=deployed, classes=CLASSES)
    pace = Pace(plan.spec.train.patience, FLOOR, grid.clock)
    strategy = AdversarialStrategy(
        create_strategy(plan.spec), plan.spec, run, plan.public, pace=pace, **more
    )
    strategy.run_rounds(grid, plan.initial)
    return run


def add_suite(
    run: Run,
    *,
    version: str | None = "standard-1",
    exhaustive: bool = False,
    flags: Iterable[tuple[str, str]] = (),
    auc: float | None = None,
    picked: str | None = None,
) -> Run:
    """What the standard suite leaves in a run: the closest of its attacks for each picture, and
    what its attacker would have picked; ``version`` None leaves none."""
    scores, summary = run.scores, run.summary
    attacked = scores[scores["attack"] != summary["baseline"]]
    keys = ["round", "client", "image"]
    best = attacked.sort_values("psnr", ascending=False, kind="stable").drop_duplicates(keys)
    choice = picked or str(attacked["attack"].iloc[-1])
    chosen = attacked[attacked["attack"] == choice].drop_duplicates(keys)
    mine = ["attack", "trial", "psnr", "ssim", "lpips", "identified"]
    names = ["picked", *[f"picked_{name}" for name in mine[1:]]]
    right = chosen[[*keys, *mine]].set_axis([*keys, *names], axis=1)
    table = best.merge(right, on=keys).sort_values(keys)
    table["recovered"] = table["psnr"] >= 30
    columns = [*keys, "picture", "attack", "trial", "psnr", "psnr_registered", "ssim", "lpips"]
    columns += ["fft2d", "identified", "label_true", "label_recovered", "digest", *names]
    run.write_table("envelope", table[[*columns, "recovered"]])
    if version is not None:
        summary["suite"] = {
            "version": version,
            "exhaustive": exhaustive,
            "members": [{"attack": a, "evaluations": 400} for a in attacked["attack"].unique()],
            "evaluations": 1200,
            "flags": [{"flag": flag, "words": words} for flag, words in flags],
        }
    if auc is not None:
        matched = {"auc": auc, "low": auc - 0.1, "high": auc + 0.1, "tpr_at_1_fpr": 0.05}
        summary["verdicts"][0]["membership"] = {"matched": matched}
    write_json(run.summary_path, summary)
    return run

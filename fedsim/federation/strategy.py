"""AdversarialStrategy: wraps any Flower strategy, sees what a server sees, keeps every reply.

Replies are taken one by one as they arrive and written to disk as observations; the wrapped
strategy then aggregates them from there, untouched, so memory does not grow with the clients.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import flwr.serverapp.strategy as flower_strategies
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedsim.core.defense import Defense
from fedsim.core.errors import RunError, SpecError, did_you_mean
from fedsim.core.learning import Update
from fedsim.core.observation import Public
from fedsim.core.run import Run
from fedsim.core.spec import Spec
from fedsim.defenses import create_defenses
from fedsim.federation.checkpoint import (
    Checkpoint,
    held_by,
    read_checkpoint,
    restore,
    write_checkpoint,
)
from fedsim.federation.grids import Cohort, StreamingGrid, identify, reason_of
from fedsim.federation.recorder import Recorder
from fedsim.federation.spool import as_weights

OnObservation = Callable[[int, int], None]  # round, client
OnRound = Callable[[dict[str, Any]], None]


def create_strategy(spec: Spec) -> Strategy:
    """The Flower strategy a spec names; sampling is ours, so it takes every node it is shown."""
    name = spec.train.strategy
    known = [
        n
        for n in flower_strategies.__all__
        if n not in ("Strategy", "Result") and not n.startswith(("Differential", "FedXgb"))
    ]
    if name not in known:
        raise SpecError(
            f"train.strategy: Flower has no strategy '{name}'{did_you_mean(name, known)}; "
            f"known: {', '.join(known)}."
        )
    everyone = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
    try:
        strategy: Strategy = getattr(flower_strategies, name)(
            **{**everyone, **spec.train.strategy_options}
        )
    except (TypeError, ValueError) as error:
        raise SpecError(f"train.strategy_options do not fit {name}: {error}.") from error
    return strategy


class AdversarialStrategy(Strategy):
    """The outermost strategy: captures every reply, then lets ``inner`` aggregate.

    ``rounds`` are those it keeps the observations of, the audited ones by default; ``capture``
    False keeps none: what a plain server would do.
    """

    def __init__(
        self,
        inner: Strategy,
        spec: Spec,
        run: Run,
        public: Public,
        *,
        capture: bool = True,
        rounds: list[int] | None = None,
        on_observation: OnObservation = lambda round_, client: None,
        on_round: OnRound = lambda row: None,
        on_committed: Callable[[int], None] = lambda round_: None,
        stop: threading.Event | None = None,
    ):
        self.inner, self.spec, self.run, self.public = inner, spec, run, public
        self.recorder = Recorder(run, public, rounds or spec.audited_rounds if capture else [])
        self.on_observation, self.on_round = on_observation, on_round
        self.on_committed = on_committed
        self.stop = stop or threading.Event()
        self.secret = _secret(spec)
        self.rows, self._arrays, self._restored = read_checkpoint(run)
        self._clients: dict[int, int] = {}  # node id -> client
        self._sent: dict[str, Tensor] = {}
        self._row: dict[str, Any] = {}
        self._events: list[tuple[str, int, str]] = []
        self._since = time.perf_counter()

    @property
    def rounds_done(self) -> int:
        return len(self.rows)

    def summary(self) -> None:
        self.inner.summary()

    def run_rounds(self, grid: Grid, initial: dict[str, Tensor]) -> None:
        """Every round that is still to be done."""
        missing = self.spec.train.rounds - self.rounds_done
        if missing <= 0:
            return
        streaming = StreamingGrid(grid, self.stop, self._revived)
        self._clients = identify(streaming, self.spec.data.clients, self.spec.train.timeout)
        restore(self.inner, self._restored)
        try:
            self.start(
                streaming,
                # In the model's own order: strategies with a memory count their arrays.
                ArrayRecord({name: self._arrays.get(name, initial[name]) for name in initial}),
                num_rounds=missing,
                timeout=self.spec.train.timeout,
            )
        finally:
            self.recorder.settle()

    # -- training ---------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        round_ = self._round = self.rounds_done + 1
        self._since = time.perf_counter()
        self._events.clear()
        self._sent = dict(arrays.to_torch_state_dict())
        self.recorder.begin(round_, self._sent)
        chosen = set(self.spec.cohort(round_))
        nodes = [node for node, client in self._clients.items() if client in chosen]
        return self.inner.configure_train(round_, arrays, config, Cohort(grid, nodes))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        round_ = self._round
        waiting = set(self.spec.cohort(round_))
        good: dict[int, Message] = {}
        masked: dict[int, tuple[Message, Update]] = {}
        total: dict[str, Tensor] = {}
        received = 0
        for reply in replies:
            client = self._clients[reply.metadata.src_node_id]
            waiting.discard(client)
            if reply.has_error():
                reason = _reason(reply)
                self._note("client_failed", client, f"client {client} failed: {reason}")
                continue
            update = _update(reply.content, self.public)
            received += update.nbytes()
            finite = update.is_finite()
            then = partial(self.on_observation, round_, client) if finite else lambda: None
            source = self.recorder.keep(round_, client, update, then)
            if not finite:
                self._note(
                    "update_rejected",
                    client,
                    f"client {client} uploaded numbers that are not finite; kept out of the "
                    f"aggregate and not attacked",
                )
                continue
            if self.secret is not None:  # one upload alone is noise: only the sum is aggregated
                total = _added(total, update.tensors)
                masked[client] = (reply, replace(update, tensors={}))
            else:
                good[client] = self._as_weights(reply, source, update.kind)
            del update, source
        if masked:
            good = self._revealed(round_, total, masked)
        for client in sorted(waiting):
            patience = self.spec.train.timeout
            self._note(
                "client_silent", client, f"client {client} did not answer within {patience:.0f} s"
            )
        # In the order of the clients, so that a sum of floats is the same in every engine.
        ordered = [good[client] for client in sorted(good)]
        arrays, metrics = self.inner.aggregate_train(round_, ordered) if ordered else (None, None)
        if arrays is not None:
            arrays = self._typed(arrays)
        self._row = {
            "round": round_,
            "clients": len(good),
            "failed": self.spec.cohort_size - len(good),
            "train_loss": float(metrics["train_loss"]) if metrics else None,  # type: ignore[arg-type]
            "bytes": received,
        }
        self._arrays = dict((arrays or ArrayRecord(self._sent)).to_torch_state_dict())
        return arrays, metrics

    def _revealed(
        self,
        round_: int,
        total: dict[str, Tensor],
        masked: dict[int, tuple[Message, Update]],
    ) -> dict[int, Message]:
        """The mean update of the cohort as everybody's reply: what its sum makes of it."""
        assert self.secret is not None
        cohort, stayed = self.spec.cohort(round_), sorted(masked)
        sums = self.secret.reveal(total, round_, cohort, stayed) or {}
        mean = {name: tensor / len(stayed) for name, tensor in sums.items()}
        return {
            client: self._as_weights(reply, replace(update, tensors=mean), update.kind)
            for client, (reply, update) in masked.items()
        }

    # -- evaluation -------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if not self.spec.train.evaluate:
            return []
        chosen = self.spec.cohort(self._round)
        nodes = {c: n for n, c in self._clients.items() if c in chosen}
        # The cohort shares out the test set, so that together it is seen exactly once.
        return [
            Message(
                RecordDict(
                    {
                        "arrays": arrays,
                        "config": ConfigRecord(
                            {"server-round": self._round, "part": part, "parts": len(chosen)}
                        ),
                    }
                ),
                dst_node_id=nodes[client],
                message_type=MessageType.EVALUATE,
            )
            for part, client in enumerate(chosen)
        ]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        good: dict[int, Message] = {}
        for reply in replies:
            client = self._clients[reply.metadata.src_node_id]
            if reply.has_error():
                reason = _reason(reply)
                self._note(
                    "evaluation_failed", client, f"client {client} could not evaluate: {reason}"
                )
            elif _metrics(reply.content)["num-examples"]:
                good[client] = reply
        ordered = [good[client] for client in sorted(good)]
        metrics = self.inner.aggregate_evaluate(self._round, ordered) if ordered else None
        for key in ("test_loss", "test_accuracy"):
            self._row[key] = float(metrics[key]) if metrics else None  # type: ignore[arg-type]
        self._row["seconds"] = round(time.perf_counter() - self._since, 3)
        self.rows.append(self._row)
        self.recorder.commit(
            partial(
                self._commit,
                Checkpoint(list(self.rows), self._arrays, held_by(self.inner)),
                list(self._events),
            )
        )
        self.on_round(self._row)
        return metrics

    # -- what is kept -----------------------------------------------------------------------

    def _commit(self, checkpoint: Checkpoint, events: list[tuple[str, int, str]]) -> None:
        round_ = checkpoint.rows[-1]["round"]
        for kind, client, message in events:
            self.run.note(kind, message, round=round_, client=client)
        write_checkpoint(self.run, checkpoint)
        self.on_committed(round_)

    def _note(self, kind: str, client: int, message: str) -> None:
        """For the run's events, once the round is whole: one that is cut short is done again."""
        self._events.append((kind, client, message))

    def _revived(self, node: int, reason: str) -> None:
        if node in self._clients:
            client = self._clients[node]
            words = f"the process of client {client} died and was started again: {reason}"
            self._note("client_revived", client, words)

    def _as_weights(self, reply: Message, source: Update | Path, kind: str) -> Message:
        """The reply as the wrapped strategy expects it: the client's new weights."""
        arrays = as_weights(self._sent, source, kind, self.spec.train.lr)
        reply.content = RecordDict({"arrays": arrays, "metrics": reply.content["metrics"]})
        return reply

    def _typed(self, arrays: ArrayRecord) -> ArrayRecord:
        """Averages of counters are floats again: give every array its own type back."""
        state = arrays.to_torch_state_dict()
        return ArrayRecord({n: t.to(self._sent[n].dtype) for n, t in state.items()})


def _secret(spec: Spec) -> Defense | None:
    """The defense under which the server reads the sum of a cohort alone, if there is one."""
    declared = create_defenses(spec.defenses)
    hiding = [d for d in declared if type(d).reveal is not Defense.reveal]
    if hiding and declared[-1] is not hiding[0]:
        raise SpecError("secure aggregation masks what is uploaded: list it as the last defense.")
    return hiding[0] if hiding else None


def _added(total: dict[str, Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: total[n] + t if n in total else t.clone() for n, t in tensors.items()}


def _reason(reply: Message) -> str:
    """Why a client failed; where the vault did, it was not the client."""
    reason = reason_of(reply.error.reason)
    if "the vault" in reason:  # of an error in another process, its words are all that arrives
        raise RunError(reason)
    return reason


def _update(content: RecordDict, public: Public) -> Update:
    metrics = _metrics(content)
    buffers = content.array_records.get("buffers")
    return Update(
        kind=public.protocol.upload,
        tensors=dict(content.array_records["arrays"].to_torch_state_dict()),
        buffers=dict(buffers.to_torch_state_dict()) if buffers else {},
        num_examples=int(metrics["num-examples"]),  # type: ignore[arg-type]
        loss=float(metrics["train_loss"]),  # type: ignore[arg-type]
    )


def _metrics(content: RecordDict) -> MetricRecord:
    return next(iter(content.metric_records.values()))

"""AdversarialStrategy: wraps any Flower strategy, sees what a server sees, records the replies.

Replies are taken one by one as they arrive, and those of observed rounds are written to disk. The
wrapped strategy then aggregates them untouched, those that do not fit in memory from disk, so that
memory does not grow with the clients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedsim.core import wire
from fedsim.core.errors import RunError
from fedsim.core.learning import Update
from fedsim.core.observation import Public
from fedsim.core.run import Run
from fedsim.core.spec import Spec
from fedsim.federation.aggregation import CohortSum, Reply, masking
from fedsim.federation.checkpoint import (
    Checkpoint,
    held_by,
    read_checkpoint,
    restore,
    write_checkpoint,
)
from fedsim.federation.grids import Cohort, StreamingGrid, identify, reason_of
from fedsim.federation.recorder import Recorder
from fedsim.federation.rounds import Event, RoundLog
from fedsim.federation.spool import as_weights

OnObservation = Callable[[int, int], None]  # round, client
OnRound = Callable[[dict[str, Any]], None]


class AdversarialStrategy(Strategy):
    """The outermost strategy: captures every reply, then lets ``inner`` aggregate.

    ``rounds`` are those whose observations it keeps, the audited ones by default; with ``capture``
    False it keeps none, like a plain server.
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
        self.mask = masking(spec)
        rows, self._arrays, self._restored = read_checkpoint(run)
        self.log = RoundLog(rows)
        self._clients: dict[int, int] = {}  # node id -> client
        self._sent: dict[str, Tensor] = {}

    @property
    def rounds_done(self) -> int:
        return self.log.done

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
                # In the model's own order: strategies with a memory number their arrays.
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
        round_ = self._round = self.log.begin()
        self._sent = dict(arrays.to_torch_state_dict())
        self.recorder.begin(round_, self._sent)
        chosen = set(self.spec.cohort(round_))
        nodes = [node for node, client in self._clients.items() if client in chosen]
        return self.inner.configure_train(round_, arrays, config, Cohort(grid, nodes))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        cohort = self.spec.cohort(self._round)
        waiting = set(cohort)
        good: dict[int, Message] = {}
        hidden = CohortSum(self.mask) if self.mask is not None else None
        received = 0
        for message in replies:
            client = self._clients[message.metadata.src_node_id]
            waiting.discard(client)
            if (why := self._failure(message)) is not None:
                self.log.note("client_failed", client, f"client {client} failed: {why}")
                continue
            reply = Reply(
                client, message, wire.uploaded(message.content, self.public.protocol.upload)
            )
            received += reply.update.nbytes()
            source = self._captured(reply)
            if source is None:
                continue
            if hidden is not None:
                hidden.add(reply)
            else:
                good[client] = self._as_weights(message, source)
            del reply, source
        if hidden is not None:
            for reply in hidden.revealed(self._round, cohort):
                good[reply.client] = self._as_weights(reply.message, reply.update)
        for client in sorted(waiting):
            words = f"client {client} did not answer within {self.spec.train.timeout:.0f} s"
            self.log.note("client_silent", client, words)
        # In the order of the clients, so that a sum of floats is the same in every engine.
        ordered = [good[client] for client in sorted(good)]
        arrays, metrics = None, None
        if ordered:
            arrays, metrics = self.inner.aggregate_train(self._round, ordered)
        if arrays is not None:
            arrays = self._typed(arrays)
        self.log.trained(len(good), len(cohort) - len(good), metrics, received)
        self._arrays = dict((arrays or ArrayRecord(self._sent)).to_torch_state_dict())
        return arrays, metrics

    def _captured(self, reply: Reply) -> Update | Path | None:
        """Record one reply; returns where to aggregate it from, None if it would spoil the sum."""
        client, finite = reply.client, reply.update.is_finite()
        then = partial(self.on_observation, self._round, client) if finite else lambda: None
        source = self.recorder.keep(self._round, client, reply.update, then)
        if finite:
            return source
        self.log.note(
            "update_rejected",
            client,
            f"client {client} uploaded numbers that are not finite; kept out of the aggregate and "
            f"not attacked",
        )
        return None

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
                wire.evaluation(arrays, self._round, wire.Share(part, len(chosen))),
                dst_node_id=nodes[client],
                message_type=MessageType.EVALUATE,
            )
            for part, client in enumerate(chosen)
        ]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        good: dict[int, Message] = {}
        for message in replies:
            client = self._clients[message.metadata.src_node_id]
            if (why := self._failure(message)) is not None:
                words = f"client {client} could not evaluate: {why}"
                self.log.note("evaluation_failed", client, words)
            elif wire.evaluated_any(message.content):
                good[client] = message
        ordered = [good[client] for client in sorted(good)]
        metrics = self.inner.aggregate_evaluate(self._round, ordered) if ordered else None
        row = self.log.evaluated(metrics)
        reached = Checkpoint(list(self.log.rows), self._arrays, held_by(self.inner))
        self.recorder.commit(partial(self._commit, reached, self.log.events))
        self.on_round(row)
        return metrics

    def _commit(self, reached: Checkpoint, events: list[Event]) -> None:
        round_ = reached.rows[-1]["round"]
        for kind, client, message in events:
            self.run.note(kind, message, round=round_, client=client)
        write_checkpoint(self.run, reached)
        self.on_committed(round_)

    # -- replies ----------------------------------------------------------------------------

    def _failure(self, message: Message) -> str | None:
        """Why a client failed, None where it did not. Where the testbed's own vault failed, the run
        ends; the vault of clients elsewhere is theirs, and so is its failure."""
        if message.has_error():
            return reason_of(message.error.reason)
        fault = wire.fault_in(message.content)
        if fault is not None and not self.run.deployed:
            raise RunError(reason_of(fault))
        return fault and reason_of(fault)

    def _revived(self, node: int, reason: str) -> None:
        if node in self._clients:
            client = self._clients[node]
            words = f"the process of client {client} died and was started again: {reason}"
            self.log.note("client_revived", client, words)

    def _as_weights(self, message: Message, source: Update | Path) -> Message:
        """The reply as the wrapped strategy expects it: the client's new weights."""
        arrays = as_weights(self._sent, source, self.spec.train.lr)
        message.content = wire.as_reply(message.content, arrays)
        return message

    def _typed(self, arrays: ArrayRecord) -> ArrayRecord:
        """Averages of counters are floats: give every array its own type back."""
        state = arrays.to_torch_state_dict()
        return ArrayRecord({n: t.to(self._sent[n].dtype) for n, t in state.items()})

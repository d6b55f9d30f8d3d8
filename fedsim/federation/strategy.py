"""AdversarialStrategy: wraps any Flower strategy, sees what a server sees, records the replies.

Replies are taken one by one as they arrive, and those of observed rounds are written to disk. The
wrapped strategy then aggregates them untouched, those that do not fit in memory from disk, so that
memory does not grow with the clients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedsim.core import wire
from fedsim.core.errors import FedsimError, ReplyError, RunError
from fedsim.core.learning import Update
from fedsim.core.observation import Public, read_update
from fedsim.core.run import Run
from fedsim.core.spec import Spec
from fedsim.defenses.applied import announced
from fedsim.defenses.guards import compares
from fedsim.defenses.guards.same_model import digest_of
from fedsim.federation.active import ActiveServer
from fedsim.federation.admission import Admission, fits
from fedsim.federation.aggregation import (
    CohortSum,
    Reply,
    masking,
    refuse_counters,
    refuse_too_few,
)
from fedsim.federation.checkpoint import (
    Checkpoint,
    held_by,
    read_checkpoint,
    restore,
    write_checkpoint,
)
from fedsim.federation.grids import Cohort, StreamingGrid
from fedsim.federation.pace import Pace
from fedsim.federation.recorder import Recorder
from fedsim.federation.roster import Roster
from fedsim.federation.rounds import Event, RoundLog
from fedsim.federation.spool import as_weights

OnObservation = Callable[[int, int], None]  # round, client
OnRound = Callable[[dict[str, Any]], None]


class AdversarialStrategy(Strategy):
    """The outermost strategy: captures every reply, then lets ``inner`` aggregate.

    ``rounds`` are those whose observations it keeps, the audited ones by default; with ``capture``
    False it keeps none, like a plain server. ``tested`` is the size of the test set, for a server
    that has no data set to count in. No reply, whatever is in it, ends a round: one that
    `Admission` does not let in is told and left out.
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
        pace: Pace | None = None,
        active: ActiveServer | None = None,
        tested: int | None = None,
    ):
        self.inner, self.spec, self.run, self.public = inner, spec, run, public
        self.mask = masking(spec)
        kept = (rounds or spec.audited_rounds) if capture else []
        together = spec.cohort if self.mask is not None else lambda round_: []
        self.recorder = Recorder(run, public, kept, together)
        self.on_observation, self.on_round = on_observation, on_round
        self.on_committed = on_committed
        self.stop = stop or threading.Event()
        self._pace, self._tested = pace, tested
        rows, self._arrays, self._restored, memory = read_checkpoint(run)
        self.active = active
        if active is not None:
            active.memory = dict(memory)
        self.log = RoundLog(rows)
        self.roster = Roster(spec.data.clients, run.note)
        self._sent: dict[str, Tensor] = {}
        self._trained: list[int] = []  # who answered in this round

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
        refuse_counters(self.inner, initial)
        self.admission = Admission(self.spec, self.run, self.public, initial, tested=self._tested)
        pace = self._pace or Pace.of(self.spec, self.run)
        self.grid = StreamingGrid(grid, self.stop, pace, self._revived, elsewhere=self.run.deployed)
        self.roster.meet(self.grid, self.spec.train.timeout)
        restore(self.inner, self._restored)
        try:
            self.start(
                self.grid,
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
        self._tell(round_)
        self._sent = dict(arrays.to_torch_state_dict())
        self.recorder.begin(round_, self._sent, self.active.memory if self.active else None)
        chosen = set(self.spec.cohort(round_))
        self.roster.look_again(self.grid, chosen, self.spec.train.timeout)
        nodes = [node for node, client in self.roster.client_of.items() if client in chosen]
        refuse_too_few(self.inner, len(nodes), round_)
        if not nodes:
            return []
        self._tamper(round_)
        self._announce(nodes)
        messages = self.inner.configure_train(round_, arrays, config, Cohort(grid, nodes))
        return messages if self.active is None else map(self._addressed, messages)

    def _tell(self, round_: int) -> None:
        """What is public of this round: its learning rate may be another one than the last's."""
        protocol = replace(self.public.protocol, lr=self.spec.train.rate(round_))
        self.public = self.recorder.public = replace(self.public, protocol=protocol)
        if self.active is not None:
            self.active.public = self.public

    def _tamper(self, round_: int) -> None:
        """Have the manoeuvre choose what each client is sent, and keep that."""
        if self.active is None:
            return
        self.active.begin(round_, self._sent)
        for client, tampered in self.active.tampered.items():
            choice = self.active.chosen_for(client)
            assert choice is not None
            self.recorder.choose(round_, client, choice, tampered.changed)

    def _sent_to(self, client: int) -> Mapping[str, Tensor]:
        return self._sent if self.active is None else self.active.sent_to(client)

    def _addressed(self, message: Message) -> Message:
        """The same message with the weights that were chosen for whom it goes to."""
        client = self.roster.client_of[message.metadata.dst_node_id]
        if self.active is not None and client in self.active.tampered:
            wire.replace_weights(message, self._sent_to(client))
        return message

    def _announce(self, nodes: list[int]) -> None:
        """Where clients compare what they receive: tell each the digest of what it will be sent, so
        that all can read it before the first of them trains."""
        if not compares(self.spec):
            return
        model, protocol, client_of = (
            announced(self.public),
            self.public.protocol,
            self.roster.client_of,
        )
        questions = [
            Message(
                wire.announcement(
                    self._round, digest_of(self._sent_to(client_of[node]), model, protocol)
                ),
                dst_node_id=node,
                message_type=MessageType.QUERY,
            )
            for node in nodes
        ]
        for _ in self.grid.send_and_receive(questions, timeout=self.spec.train.timeout):
            pass  # who says nothing has no notice, and the others will see that

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        cohort = self.spec.cohort(self._round)
        good: dict[int, Message] = {}
        hidden = CohortSum(self.mask) if self.mask is not None else None
        received, admitted = 0, dict[int, Update | Path]()
        heard = set[int]()
        for client, message in self._heard(replies, cohort, heard, "update_rejected"):
            reply = self._let_in(client, message)
            if reply is None:
                continue
            received += reply.update.nbytes()
            source = self._captured(reply)
            if hidden is not None:
                hidden.add(reply)
            else:
                admitted[client] = source
                good[client] = self._as_weights(reply, source)
            del reply, source
        if hidden is not None:
            for reply in self._revealed(hidden, cohort):
                admitted[reply.client] = reply.update
                good[reply.client] = self._as_weights(reply, reply.update)
        self._learn(admitted)
        good = self._kept(good)
        self._note_silent(set(cohort) - heard)
        self._trained = sorted(heard)
        # In the order of the clients, so that a sum of floats is the same in every engine.
        arrays, metrics = self._aggregated([good[client] for client in sorted(good)])
        failed = len(cohort) - len(admitted)
        if good and arrays is None:
            good, failed = {}, len(cohort)
        self.log.trained(len(good), failed, metrics, received)
        self._arrays = dict((arrays or ArrayRecord(self._sent)).to_torch_state_dict())
        return arrays, metrics

    def _learn(self, admitted: Mapping[int, Update | Path]) -> None:
        """Let the manoeuvre take in what came back."""
        if self.active is not None:
            updates = (
                (client, source if isinstance(source, Update) else read_update(source))
                for client, source in sorted(admitted.items())
            )
            self.active.take_in(updates, admitted)

    def _kept(self, good: dict[int, Message]) -> dict[int, Message]:
        """The replies that enter the global model: those to tampered weights only where the server
        wants them to; where a sum is all it has, that is tampered with as a whole."""
        tampered = self.active.tampered if self.active is not None else {}
        if not tampered or self.spec.server.aggregate == "include":
            return good
        if self.mask is not None:
            return {}
        return {client: reply for client, reply in good.items() if client not in tampered}

    def _let_in(self, client: int, message: Message) -> Reply | None:
        """An update that may be used; None where a client failed, or sent what is none."""
        if (why := self._failure(message)) is not None:
            self.log.note("client_failed", client, f"client {client} failed: {why}")
            return None
        if (why := self._refusal(message)) is not None:
            self.log.note("client_refused", client, f"client {client} did not upload: {why}")
            return None
        try:
            update, fault = self.admission.train(message)
        except Exception as error:  # whatever a reply is, it is that client's alone
            self._reject("update_rejected", client, f"the update of client {client}", error)
            return None
        if fault is None:
            return Reply(client, message, update)
        if not update.is_finite():  # of the right form: kept as it came, for whoever looks into it
            self.recorder.keep(self._round, client, update, lambda: None)
        words = f"the update of client {client} is left out and not attacked: {fault}"
        self.log.note("update_rejected", client, words)
        return None

    def _captured(self, reply: Reply) -> Update | Path:
        """Record one reply; returns where to aggregate it from."""
        then = partial(self.on_observation, self._round, reply.client)
        return self.recorder.keep(self._round, reply.client, reply.update, then)

    def _revealed(self, hidden: CohortSum, cohort: list[int]) -> list[Reply]:
        """What the sum of a cohort tells; nothing, where a mask that was made up spoiled it."""
        replies = list(hidden.revealed(self._round, cohort))
        fault = self.admission.fault_of(replies[0].update) if replies else None
        if fault is None:
            return replies
        words = f"the sum of the masked updates is left out, and nobody can say whose: {fault}"
        self.log.note("sum_rejected", None, words)
        return []

    def _aggregated(self, replies: list[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """What the wrapped strategy makes of the replies; nothing, where that is no model."""
        if not replies:
            return None, None
        try:
            arrays, metrics = self.inner.aggregate_train(self._round, replies)
            state = arrays.to_torch_state_dict() if arrays is not None else {}
        except (OSError, FedsimError):  # updates are read back from disk: no client's fault
            raise
        except Exception as error:
            name = self.spec.train.strategy
            reason = wire.reason_of(f"{type(error).__name__}: {error}")
            if not self.log.events:
                raise RunError(f"train.strategy {name} could not aggregate: {reason}") from error
            self.log.note("aggregate_rejected", None, f"{name} could not aggregate: {reason}")
            return None, None
        if arrays is not None and not fits(state, self._sent):
            words = "the aggregate is left out: it is not finite, or not of the model's shapes"
            self.log.note("aggregate_rejected", None, words)
            return None, None
        return (self._typed(state) if arrays is not None else None), metrics

    # -- evaluation -------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if not self.spec.train.evaluate:
            return []
        # Those who answered share out the test set, so that together it is seen exactly once.
        nodes = {client: node for node, client in self.roster.client_of.items()}
        return [
            Message(
                wire.evaluation(arrays, self._round, wire.Share(part, len(self._trained))),
                dst_node_id=nodes[client],
                message_type=MessageType.EVALUATE,
            )
            for part, client in enumerate(self._trained)
        ]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        good: dict[int, Message] = {}
        heard = set[int]()
        for client, message in self._heard(replies, self._trained, heard, "evaluation_rejected"):
            if (why := self._failure(message)) is not None:
                words = f"client {client} could not evaluate: {why}"
                self.log.note("evaluation_failed", client, words)
                continue
            try:
                result = self.admission.evaluation(message, len(self._trained))
            except Exception as error:  # whatever a reply is, it is that client's alone
                what = f"the evaluation of client {client}"
                self._reject("evaluation_rejected", client, what, error)
                continue
            if result.examples:
                if self.admission.tested is None:  # what it claims is nothing to weigh it by
                    message.content = wire.evaluated(result._replace(examples=1))
                good[client] = message
        ordered = [good[client] for client in sorted(good)]
        metrics = self.inner.aggregate_evaluate(self._round, ordered) if ordered else None
        row = self.log.evaluated(metrics)
        memory = self.active.memory if self.active is not None else {}
        reached = Checkpoint(list(self.log.rows), self._arrays, held_by(self.inner), memory)
        self.recorder.commit(partial(self._commit, reached, self.log.events))
        self.on_round(row)
        return metrics

    def _commit(self, reached: Checkpoint, events: list[Event]) -> None:
        round_ = reached.rows[-1]["round"]
        # By client: replies come in any order, and a run done again must tell the same.
        for kind, client, message in sorted(
            events, key=lambda e: -1 if e.client is None else e.client
        ):
            whose = {} if client is None else {"client": client}
            self.run.note(kind, message, round=round_, **whose)
        write_checkpoint(self.run, reached)
        self.on_committed(round_)

    # -- replies ----------------------------------------------------------------------------

    def _heard(
        self, replies: Iterable[Message], asked: Collection[int], heard: set[int], kind: str
    ) -> Iterator[tuple[int, Message]]:
        """The first reply of each client that was asked; any other is told and left out."""
        for message in replies:
            client = self.roster.client_of.get(message.metadata.src_node_id)
            if client is None:
                self.log.note(kind, None, "a node that is no client sent a reply; it is left out")
            elif client not in asked or client in heard:
                often = "again" if client in heard else "without being asked"
                self.log.note(kind, client, f"client {client} replied {often}; that is left out")
            else:
                heard.add(client)
                yield client, message

    def _reject(self, kind: str, client: int, what: str, error: Exception) -> None:
        reason = str(error) if isinstance(error, ReplyError) else type(error).__name__
        self.log.note(kind, client, f"{what} is left out: {reason}")

    def _note_silent(self, clients: Iterable[int]) -> None:
        for client in sorted(clients):
            there = client in self.roster
            why = f"did not answer within {self.grid.waited:.0f} s" if there else "is not there"
            self.log.note("client_silent", client, f"client {client} {why}")

    def _failure(self, message: Message) -> str | None:
        """Why a client failed, None where it did not. Where the testbed's own vault failed, the run
        ends; the vault of clients elsewhere is theirs, and so is its failure."""
        if message.has_error():
            return wire.reason_of(message.error.reason)
        if not message.has_content():
            return None
        fault = wire.fault_in(message.content)
        if fault is not None and not self.run.deployed:
            raise RunError(fault)
        return fault

    def _refusal(self, message: Message) -> str | None:
        """Why a client's guards kept it from uploading; None where they did not."""
        refused = wire.refusal_in(message.content) if message.has_content() else None
        return refused if self.spec.guards else None

    def _revived(self, node: int, reason: str) -> None:
        client = self.roster.client_of.get(node)
        if client is not None:
            words = f"the process of client {client} died and was started again: {reason}"
            self.log.note("client_revived", client, words)

    def _as_weights(self, reply: Reply, source: Update | Path) -> Message:
        """The reply as the wrapped strategy expects it: the client's new weights."""
        arrays = as_weights(self._sent_to(reply.client), source, self.public.protocol.lr)
        reply.message.content = wire.as_reply(reply.update, arrays)
        return reply.message

    def _typed(self, state: Mapping[str, Tensor]) -> ArrayRecord:
        """Averages of counters are floats: give every array its own type back."""
        return ArrayRecord({n: t.to(self._sent[n].dtype) for n, t in state.items()})

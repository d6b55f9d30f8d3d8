"""Grids: how the server reaches its clients. Flower's own, wrapped, or one in this process."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedsim.core import wire
from fedsim.core.errors import RunError

DEATHS, RESTART_SECONDS = 60, 1.0  # how often a dead client is asked, how far apart


class _GridProxy(Grid):
    """A grid that hands everything on to another one."""

    def __init__(self, grid: Grid):
        self.grid = grid

    def set_run(self, run: Any) -> None:
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        return self.grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self.grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.grid.send_and_receive(messages, timeout=timeout)


class Cohort(_GridProxy):
    """A grid that shows only the clients of this round."""

    def __init__(self, grid: Grid, nodes: list[int]):
        super().__init__(grid)
        self.nodes = nodes

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)


class StreamingGrid(_GridProxy):
    """A grid whose replies come one by one, as they arrive, instead of all at the end.

    A client whose process died is asked again once Ray has started another; ``revived`` is called
    when it answers. A client whose own code failed has answered.
    """

    def __init__(
        self,
        grid: Grid,
        stop: threading.Event,
        revived: Callable[[int, str], None] = lambda node, reason: None,
    ):
        super().__init__(grid)
        self.stop, self.revived = stop, revived

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        messages = list(messages)
        waiting = dict(zip(self.push_messages(messages), messages, strict=True))
        return self._replies(waiting, timeout)

    def _replies(self, waiting: dict[str, Message], timeout: float | None) -> Iterator[Message]:
        end = time.monotonic() + (timeout or float("inf"))
        deaths: dict[int, list[str]] = {}
        while waiting and time.monotonic() < end:
            if self.stop.is_set():
                raise RunError("the run was stopped.")
            arrived, dead = False, list[Message]()
            for reply in self.pull_messages(list(waiting)):
                arrived = True
                question = waiting.pop(reply.metadata.reply_to_message_id)
                node = reply.metadata.src_node_id
                if reply.has_error() and reply.error.code == ErrorCode.UNKNOWN:
                    deaths.setdefault(node, []).append(reason_of(reply.error.reason))
                    if len(deaths[node]) < DEATHS:
                        dead.append(question)
                        continue
                elif node in deaths:
                    self.revived(node, deaths[node][0])
                yield reply
                del reply
            if dead:
                time.sleep(RESTART_SECONDS)
                repeated = [_once_more(message) for message in dead]
                waiting |= zip(self.push_messages(repeated), repeated, strict=True)
            elif waiting and not arrived:
                time.sleep(0.05)


def _once_more(message: Message) -> Message:
    about = message.metadata
    return Message(message.content, dst_node_id=about.dst_node_id, message_type=about.message_type)


class InlineGrid(Grid):
    """A grid that runs each client in this process, when its reply is asked for.

    For tests and breakpoints. Flower offers no public way to do this: the identity of the task and
    the message ids, which its runtime sets, are set here under their private names.
    """

    def __init__(self, app: ClientApp, clients: int):
        self.app = app
        self.contexts = {
            client + 1: Context(
                run_id=1,
                node_id=client + 1,
                node_config=wire.node_config(client, clients),
                state=RecordDict(),
                run_config={},
            )
            for client in range(clients)
        }
        self.waiting: dict[str, Message] = {}
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    def set_run(self, run: Any) -> None:
        raise RunError("the in-process grid has no other runs.")

    @property
    def run(self) -> Any:
        raise RunError("the in-process grid has no run of Flower's.")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise RunError("make messages with the Message class.")

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = []
        for message in messages:
            name = uuid.uuid4().hex
            message.metadata.__dict__["_message_id"] = name
            self.waiting[name] = message
            pushed.append(name)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        for name in list(message_ids):
            if name in self.waiting:
                yield self._answer(self.waiting.pop(name))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        context = self.contexts[message.metadata.dst_node_id]
        try:
            return self.app(message, context)
        except Exception as error:  # to the server, a client's error is a reply
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def identify(grid: Grid, clients: int, timeout: float) -> dict[int, int]:
    """Ask every node which client it is: node ids are random, partition ids are not."""
    end = time.monotonic() + timeout
    while len(nodes := list(grid.get_node_ids())) < clients:
        if time.monotonic() > end:
            raise RunError(f"only {len(nodes)} of {clients} clients connected in {timeout:.0f} s.")
        time.sleep(0.05)
    questions = [
        Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY) for node in nodes
    ]
    client_of_node: dict[int, int] = {}
    for reply in grid.send_and_receive(questions, timeout=timeout):
        if reply.has_error():
            raise RunError(f"a client cannot start: {reason_of(reply.error.reason)}")
        client_of_node[reply.metadata.src_node_id] = wire.introduced(reply.content)
    _check_partitions(sorted(client_of_node.values()), clients)
    return client_of_node


def _check_partitions(partitions: list[int], clients: int) -> None:
    """Every client once: one that is here twice would be attacked as two."""
    for one in partitions:
        if not 0 <= one < clients:
            raise RunError(
                f"a node says it is client {one}, and there are clients 0 to {clients - 1} only; "
                f"correct its partition-id."
            )
        if partitions.count(one) > 1:
            raise RunError(f"two nodes say they are client {one}; correct one's partition-id.")
    if partitions != list(range(clients)):
        raise RunError(
            f"the nodes say they are clients {partitions}; expected each of 0 to {clients - 1} "
            f"once."
        )


def reason_of(text: str | None) -> str:
    """The last line of a client's error, without the wrapping of the runtime."""
    lines = [line.strip(" '\">") for line in str(text).splitlines() if line.strip(" '\">")]
    return lines[-1] if lines else "no reason given"

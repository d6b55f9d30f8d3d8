"""Grids: how the server reaches its clients. Flower's own, wrapped, or one in this process."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import httpx
from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedsim.core import wire
from fedsim.core.errors import FedsimError, RunError
from fedsim.federation.pace import Pace

DEATHS, RESTART_SECONDS = 60, 1.0  # how often a dead client is asked, how far apart
LOOK_SECONDS = 0.05  # between two looks for replies; a look at clients elsewhere asks for each
FETCH_SECONDS = 1.0  # how long a look waits for one reply before it goes on to the others


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
    """A grid whose replies come one by one, as they arrive, instead of all at the end, and whose
    ``pace`` says when it has waited long enough for the rest.

    In a simulation, a client whose process died is asked again once Ray has started another;
    ``revived`` is called when it answers. A client whose own code failed has answered. Replies of
    clients ``elsewhere`` are fetched each for itself: one that cannot be read, or that never comes
    to an end, is that client's alone.
    """

    def __init__(
        self,
        grid: Grid,
        stop: threading.Event,
        pace: Pace,
        revived: Callable[[int, str], None] = lambda node, reason: None,
        *,
        elsewhere: bool = False,
    ):
        super().__init__(grid)
        self.stop, self.pace, self.revived = stop, pace, revived
        self.elsewhere = elsewhere and not isinstance(grid, InlineGrid)
        self.waited = 0.0  # for the last cohort, in seconds

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        messages = list(messages)
        pushed = set(self.push_messages(messages)) if messages else set()
        waiting = {message.metadata.message_id: message for message in messages}
        return self._replies({n: m for n, m in waiting.items() if n in pushed}, timeout)

    def _replies(self, waiting: dict[str, Message], timeout: float | None) -> Iterator[Message]:
        clock, limit = self.pace.clock, timeout or float("inf")
        began, kind = clock.monotonic(), _kind(waiting)
        answered: dict[int, float] = {}
        deaths: dict[int, list[str]] = {}
        fetches: dict[str, _Fetch] = {}
        while waiting:
            if self.stop.is_set():
                raise RunError("the run was stopped.")
            arrived, dead = False, list[Message]()
            for reply in self._arrived(waiting, fetches):
                question = waiting.pop(reply.metadata.reply_to_message_id, None)
                if question is None:
                    continue  # nobody asked
                arrived, reply = True, _own(reply, question)
                node = question.metadata.dst_node_id
                if self._died(reply):
                    deaths.setdefault(node, []).append(wire.reason_of(reply.error.reason))
                    if len(deaths[node]) < DEATHS:
                        dead.append(question)
                        continue
                elif node in deaths:
                    self.revived(node, deaths[node][0])
                answered[node] = clock.monotonic() - began
                yield reply
                del reply
            self.waited = clock.monotonic() - began
            if dead:
                clock.sleep(RESTART_SECONDS)
                repeated = [_once_more(message) for message in dead]
                pushed = set(self.push_messages(repeated))
                asked = {message.metadata.message_id: message for message in repeated}
                waiting |= {name: message for name, message in asked.items() if name in pushed}
            elif not arrived:
                # Looked once more after the time was up: what was there by then is not too late.
                if self.waited >= self.pace.seconds(kind, _nodes(waiting), answered, limit):
                    break
                clock.sleep(min(1.0, LOOK_SECONDS * (len(waiting) if self.elsewhere else 1)))
        self.pace.remember(kind, _nodes(waiting), answered)

    def _died(self, reply: Message) -> bool:
        """Whether a simulation lost the client's process, of which the client knows nothing."""
        return not self.elsewhere and reply.has_error() and reply.error.code == ErrorCode.UNKNOWN

    def _arrived(
        self, waiting: Mapping[str, Message], fetches: dict[str, _Fetch]
    ) -> Iterator[Message]:
        """What has come of the replies that are waited for."""
        if not self.elsewhere:
            yield from self.pull_messages(list(waiting))
            return
        for name, question in list(waiting.items()):
            fetch = fetches.pop(name, None) or _Fetch(partial(self.pull_messages, [name]))
            if not fetch.done.wait(0 if fetch.late else FETCH_SECONDS):
                fetch.late, fetches[name] = True, fetch
                continue
            try:
                yield from fetch.result()
            except Exception as error:
                if not _of_the_reply(error):
                    raise
                unread = Error(
                    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
                    f"its reply cannot be read ({type(error).__name__})",
                )
                yield Message(unread, reply_to=question)


class _Fetch:
    """A reply on its way from the SuperLink, in a thread of its own: Flower waits there for hours
    for the parts of a message that a client has announced and does not send."""

    def __init__(self, pull: Callable[[], Iterable[Message]]):
        self.done, self.late = threading.Event(), False
        self._replies: list[Message] = []
        self._error: Exception | None = None
        threading.Thread(target=self._run, args=(pull,), daemon=True, name="fetch").start()

    def _run(self, pull: Callable[[], Iterable[Message]]) -> None:
        try:
            self._replies = list(pull())
        except Exception as error:
            self._error = error
        self.done.set()

    def result(self) -> list[Message]:
        if self._error is not None:
            raise self._error
        return self._replies


def _of_the_reply(error: Exception) -> bool:
    """Whether a reply could not be read, and not the SuperLink reached: then it is no client's."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR
    return not isinstance(error, httpx.HTTPError | OSError | FedsimError)


def _own(reply: Message, question: Message) -> Message:
    """The reply as one of the node that was asked: of an error, Flower may say it is its own."""
    if reply.metadata.src_node_id == question.metadata.dst_node_id:
        return reply
    reason = reply.error.reason if reply.has_error() else "another node answered in its place"
    return Message(Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, reason), reply_to=question)


def _kind(waiting: Mapping[str, Message]) -> str:
    return next((message.metadata.message_type for message in waiting.values()), "")


def _nodes(waiting: Mapping[str, Message]) -> list[int]:
    return [message.metadata.dst_node_id for message in waiting.values()]


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

"""Roster: which node is which client. Node ids are random, so every node is asked.

Who cannot say it, or says what cannot be, is told and left out, and the federation goes on with the
others. Whoever has no place on the roster is asked again when a round wants a client that is not
on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from flwr.app import Message, MessageType, RecordDict

from fedsim.core import wire
from fedsim.core.errors import ReplyError, RunError
from fedsim.federation.grids import StreamingGrid

CONNECT = "connect"  # a kind of question for the pace, beside Flower's own
LATE_SECONDS = 300.0  # clients that connect are starting up: they get no less than this
LOOK_SECONDS = 0.05

Tell = Callable[[str, str], None]  # kind of an event, its words


class Roster:
    """The clients of a federation, by node."""

    def __init__(self, clients: int, tell: Tell = lambda kind, words: None):
        self.clients, self.tell = clients, tell
        self.client_of: dict[int, int] = {}
        self._first = ""  # what was told first: why nobody came, where nobody does

    def __contains__(self, client: int) -> bool:
        return client in self.client_of.values()

    def meet(self, grid: StreamingGrid, timeout: float) -> None:
        """Wait for the nodes and ask them all; nobody on the roster is an error."""
        connected = self._connected(grid, timeout)
        self._ask(grid, connected, timeout)
        if not self.client_of:
            raise RunError(self._first)
        missing = [client for client in range(self.clients) if client not in self]
        if missing:
            who = f"client {missing[0]} is" if len(missing) == 1 else f"{len(missing)} clients are"
            self._note("client_missing", f"{who} not there; the federation goes on without.")

    def look_again(self, grid: StreamingGrid, wanted: Collection[int], timeout: float) -> None:
        """Ask the nodes without a place, if a client that is wanted has none either."""
        if all(client in self for client in wanted):
            return
        nodes = [node for node in grid.get_node_ids() if node not in self.client_of]
        grid.pace.silent |= set(nodes)  # no round waits long for them
        self._ask(grid, nodes, timeout)

    def _connected(self, grid: StreamingGrid, timeout: float) -> list[int]:
        """The nodes, as soon as there are as many as clients, or no more are to be expected."""
        pace, clock = grid.pace, grid.pace.clock
        began, came = clock.monotonic(), dict[int, float]()
        while True:
            waited = clock.monotonic() - began
            came |= {node: waited for node in grid.get_node_ids() if node not in came}
            if len(came) >= self.clients:
                break
            if grid.stop.is_set():
                raise RunError("the run was stopped.")
            absent = range(-1, len(came) - self.clients - 1, -1)  # they have no ids yet
            patient = pace.seconds(CONNECT, absent, came, timeout)
            if waited >= min(timeout, max(patient, LATE_SECONDS)):
                break
            clock.sleep(LOOK_SECONDS)
        if not came:
            raise RunError(f"none of {self.clients} clients connected in {waited:.0f} s.")
        return list(came)

    def _ask(self, grid: StreamingGrid, nodes: Collection[int], timeout: float) -> None:
        questions = [
            Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY)
            for node in nodes
        ]
        claims: dict[int, int] = {}
        silent = set(nodes)
        for reply in grid.send_and_receive(questions, timeout=timeout):
            silent.discard(reply.metadata.src_node_id)
            try:
                claims[reply.metadata.src_node_id] = self._claim(reply)
            except ReplyError as error:
                self._note("node_refused", str(error))
        if silent:
            self._note("node_refused", "a node did not say in time which client it is.")
        held = Counter([*claims.values(), *self.client_of.values()])
        for node, client in claims.items():
            if held[client] == 1:
                self.client_of[node] = client
            else:
                words = f"two nodes say they are client {client}; correct one's partition-id."
                self._note("node_refused", words)

    def _claim(self, reply: Message) -> int:
        """Which client a node says it is, where that can be."""
        if reply.has_error():
            raise ReplyError(f"a client cannot start: {wire.reason_of(reply.error.reason)}")
        try:
            client = wire.introduced(reply.content)
        except Exception as error:  # anybody could have written it
            raise ReplyError("a node does not say which client it is.") from error
        if not 0 <= client < self.clients:
            raise ReplyError(
                f"a node says it is client {client}, and there are clients 0 to "
                f"{self.clients - 1} only; correct its partition-id."
            )
        return client

    def _note(self, kind: str, words: str) -> None:
        self._first = self._first or words
        self.tell(kind, words)

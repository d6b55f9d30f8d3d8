"""Grids: replies as they come, whoever they come from, and an end to the waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest
from flwr.app import Message, MessageType, RecordDict
from flwr.app.error import Error
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode

from fedsim.core.errors import RunError
from fedsim.federation.grids import DEATHS, StreamingGrid
from fedsim.federation.pace import FLOOR, GRACE, Pace
from tests.canned import SILENT, CannedGrid, canned_plan

HOUR = 3600.0
TRAIN = MessageType.TRAIN


def canned(clients: int = 3) -> CannedGrid:
    return CannedGrid(clients, canned_plan())


def questions(grid: CannedGrid) -> list[Message]:
    return [Message(RecordDict(), dst_node_id=n, message_type=TRAIN) for n in grid.nodes]


def streaming(grid: CannedGrid, **more: Any) -> StreamingGrid:
    return StreamingGrid(grid, threading.Event(), Pace(10, FLOOR, grid.clock), **more)


def answered(stream: StreamingGrid, grid: CannedGrid, timeout: float = HOUR) -> dict[int, Message]:
    replies = stream.send_and_receive(questions(grid), timeout=timeout)
    return {reply.metadata.src_node_id: reply for reply in replies}


@pytest.mark.parametrize("elsewhere", [True, False])
def test_replies_come_as_they_arrive_and_nobody_is_waited_for_in_vain(elsewhere: bool) -> None:
    grid = canned()
    grid.delays = {(0, TRAIN): 30.0, (1, TRAIN): 2.0, (2, TRAIN): 7.0}
    assert list(answered(streaming(grid, elsewhere=elsewhere), grid)) == [2, 3, 1]
    assert 30 <= grid.clock.now < 32


def test_a_silent_client_costs_the_pace_once_and_then_a_grace() -> None:
    grid = canned()
    grid.delays[2, TRAIN] = SILENT
    stream, ends = streaming(grid), []
    for _ in range(3):
        assert set(answered(stream, grid)) == {1, 2}
        ends.append(stream.waited)
    assert FLOOR <= ends[0] < FLOOR + 2
    assert GRACE <= ends[1] < GRACE + 2
    assert GRACE <= ends[2] < GRACE + 2
    assert [client for client, _, _ in grid.asked].count(2) == 3, "it is still asked"
    del grid.delays[2, TRAIN]
    assert set(answered(stream, grid)) == {1, 2, 3}


def test_the_timeout_is_the_most_even_where_nobody_answers() -> None:
    grid = canned()
    grid.delays = {(client, TRAIN): SILENT for client in range(3)}
    stream = streaming(grid)
    assert answered(stream, grid, timeout=50) == {}
    assert 50 <= stream.waited < 52


def test_what_had_arrived_when_the_time_was_up_is_not_too_late() -> None:
    """The server was busy with the first reply for longer than it would have waited."""
    grid = canned()
    grid.delays[2, TRAIN] = 20.0
    replies = streaming(grid).send_and_receive(questions(grid), timeout=HOUR)
    nodes = [next(replies).metadata.src_node_id]
    grid.clock.now += 2 * FLOOR
    nodes += [reply.metadata.src_node_id for reply in replies]
    assert sorted(nodes) == [1, 2, 3]


def test_a_simulated_client_whose_process_died_is_asked_again_and_one_elsewhere_is_not() -> None:
    for elsewhere in (False, True):
        grid, revived = canned(), []
        died = iter([Error(ErrorCode.UNKNOWN, "killed"), Error(ErrorCode.UNKNOWN, "killed")])
        grid.answers[1, TRAIN] = lambda content, died=died: next(died, content)
        stream = streaming(
            grid, elsewhere=elsewhere, revived=lambda node, why, to=revived: to.append((node, why))
        )
        assert answered(stream, grid)[2].has_error() is elsewhere
        assert revived == ([] if elsewhere else [(2, "killed")])


def test_a_client_that_keeps_dying_is_given_up() -> None:
    grid = canned()
    grid.answers[1, TRAIN] = lambda content: Error(ErrorCode.UNKNOWN, "killed")
    grid.delays[1, TRAIN] = 0.0
    assert answered(streaming(grid), grid)[2].has_error()
    assert [client for client, _, _ in grid.asked].count(1) == DEATHS


class Odd(CannedGrid):
    """A grid whose second client's replies are not as they should be."""

    def __init__(self, odd: Any) -> None:
        super().__init__(3, canned_plan())
        self.odd = odd

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        for reply in super().pull_messages(message_ids):
            yield from self.odd(reply) if reply.metadata.src_node_id == 2 else [reply]


def stranger(reply: Message, source: int, question: str | None = None) -> Message:
    about = reply.metadata
    metadata = Metadata(
        run_id=about.run_id,
        message_id="",
        src_node_id=source,
        dst_node_id=about.dst_node_id,
        reply_to_message_id=question or about.reply_to_message_id,
        group_id="",
        created_at=about.created_at,
        ttl=about.ttl,
        message_type=about.message_type,
    )
    if source == SUPERLINK_NODE_ID:
        return make_message(metadata, error=Error(ErrorCode.NODE_UNAVAILABLE, "Node unavailable"))
    return make_message(metadata, content=reply.content)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_an_error_of_the_superlink_is_one_of_the_node_it_speaks_of(elsewhere: bool) -> None:
    grid = Odd(lambda reply: [stranger(reply, SUPERLINK_NODE_ID)])
    replies = answered(streaming(grid, elsewhere=elsewhere), grid)
    assert sorted(replies) == [1, 2, 3]
    assert replies[2].error.reason == "Node unavailable"


@pytest.mark.parametrize("elsewhere", [True, False])
def test_nobody_answers_for_another_and_nobody_twice(elsewhere: bool) -> None:
    grid = Odd(lambda reply: [stranger(reply, 99, "nobody asked this"), reply, reply])
    stream = streaming(grid, elsewhere=elsewhere)
    seen = [r.metadata.src_node_id for r in stream.send_and_receive(questions(grid), timeout=HOUR)]
    assert sorted(seen) == [1, 2, 3]
    impostor = Odd(lambda reply: [stranger(reply, 3)])
    replies = answered(streaming(impostor, elsewhere=elsewhere), impostor)
    assert "another node answered" in str(replies[2].error.reason)
    assert not replies[3].has_error()


def raising(error: Exception) -> Any:
    def pull(reply: Message) -> list[Message]:
        raise error

    return pull


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such child"),
        KeyError("Array"),
        RecursionError(),
        UnicodeDecodeError("a", b"", 0, 1, ""),
    ],
)
def test_a_reply_that_flower_cannot_read_is_that_clients_alone(error: Exception) -> None:
    grid = Odd(raising(error))
    replies = answered(streaming(grid, elsewhere=True), grid)
    assert sorted(replies) == [1, 2, 3]
    assert f"cannot be read ({type(error).__name__})" in str(replies[2].error.reason)
    assert not replies[1].has_error()


def status(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://here/")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(code))


def test_a_superlink_that_cannot_be_reached_is_no_clients_fault() -> None:
    for error in (httpx.ConnectError("refused"), status(401), ConnectionResetError()):
        grid = Odd(raising(error))
        with pytest.raises(type(error)):
            answered(streaming(grid, elsewhere=True), grid)
    grid = Odd(raising(status(500)))  # it was reached, and could not make sense of this one
    assert answered(streaming(grid, elsewhere=True), grid)[2].has_error()


def test_a_reply_that_never_comes_to_an_end_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedsim.federation.grids.FETCH_SECONDS", 0.2)
    forever = threading.Event()

    def trickle(reply: Message) -> list[Message]:
        forever.wait(60)
        return [reply]

    grid = Odd(trickle)
    try:
        assert set(answered(streaming(grid, elsewhere=True), grid)) == {1, 3}
    finally:
        forever.set()


def test_a_message_that_cannot_be_sent_is_not_waited_for() -> None:
    class Unreachable(CannedGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            names = list(super().push_messages(messages))
            return ["" if at == 1 else name for at, name in enumerate(names)]

    grid = Unreachable(3, canned_plan())
    assert set(answered(streaming(grid), grid)) == {1, 3}
    assert grid.clock.now < 5


def test_a_run_that_is_stopped_stops_waiting() -> None:
    grid = canned()
    stream = streaming(grid)
    stream.stop.set()
    with pytest.raises(RunError, match="stopped"):
        answered(stream, grid)

"""CapturedStrategy: any strategy of Flower's Message API, kept for an audit as it goes.

    strategy = fedsim.capture(FedAvg(...), "runs/mine", model=Net, image_size=32, classes=10)

The wrapped strategy runs its own `start`, with its own state, keys, sampling and metrics; the grid
that it is given hands on every message as it is and notes what passes. Where another wrapper calls
the strategy round by round instead (differential privacy's do), what it configures and aggregates
is noted in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedsim.captures.declaration import Declaration
from fedsim.captures.flower_defenses import Recognised, recognised, wrappers_around
from fedsim.captures.session import Session
from fedsim.captures.trouble import reason, warn

_OURS = ("_inner", "_capture", "_session")


def capture(
    strategy: Strategy,
    root: str | Path,
    *,
    model: Any = None,
    image_size: Any = None,
    mean: Any = (0.5, 0.5, 0.5),
    std: Any = (0.5, 0.5, 0.5),
    classes: int | None = None,
    defenses: Any = (),
    **train: Any,
) -> Strategy:
    """The same strategy, whose rounds are kept in the directory ``root`` for `fedsim audit`.

    ``model`` is what every client trains: a class or a function that makes it, by itself, in a
    `functools.partial` or as an import path ``package.module:Net``, a name of timm's, a mapping of
    ``name`` and ``options``, or the model itself. ``mean`` and ``std`` are those that pictures in
    [0, 1] are normalised by. What a server cannot see of the training is declared by its name in a
    spec's section ``train``: ``batch_size``, ``local_epochs`` or ``local_steps``, ``optimizer``,
    ``lr``, ``momentum``, ``weight_decay``, ``loss`` and so on; ``defenses`` as a spec names them.

    A relative ``root`` is one of the process that runs the ServerApp: with `flwr run`, of the
    SuperLink, which stays in the folder where it was started. The whole path is in Flower's log.
    A directory that holds something already is left alone: the run goes into ``root-2``.

    Nothing that goes wrong here reaches the training: it is a warning, and an event of the run.
    """
    try:
        declared = Declaration.of(model, image_size, mean, std, classes, train, defenses)
        return CapturedStrategy(strategy, Path(root).expanduser().absolute(), declared)
    except Exception as error:
        warn(f"the app is not captured: {reason(error)}")
        return strategy


class CapturedStrategy(Strategy):
    """A strategy whose messages are noted. Every attribute is that of the wrapped one, and so is
    its class for whoever asks by `isinstance`."""

    def __init__(self, inner: Strategy, root: Path, declared: Declaration):
        own = vars(self)
        own["_inner"], own["_capture"], own["_session"] = inner, (root, declared), None

    @property  # type: ignore[misc]  # Python's own way to stand for another object
    def __class__(self) -> Any:
        return type(self._inner)

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """The wrapped strategy's own `start`, on a grid that notes what passes."""
        session = _begun(self)
        given = [_watched(value, session) for value in args]
        named = {key: _watched(value, session) for key, value in kwargs.items()}
        vars(self)["_session"] = session
        try:
            return self._inner.start(*given, **named)
        finally:
            vars(self)["_session"] = None
            session.end()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = self._inner.configure_train(server_round, arrays, config, grid)
        session = self._stepwise()
        if session is None:
            return messages
        return _noted(messages, session, _recognised(self))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        session = self._stepwise()
        if session is not None:
            replies = list(replies)
            for reply in replies:
                session.received(reply)
            session.round_over()
        return self._inner.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self._inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return self._inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self._inner.summary()

    def _stepwise(self) -> Session | None:
        """The session of a strategy that another one calls; None while its own `start` runs, whose
        grid notes everything already."""
        own = vars(self)
        session = own["_session"]
        if isinstance(session, Session):
            return session if session.stepwise else None
        session = own["_session"] = _begun(self, stepwise=True)
        return session

    def __getattr__(self, name: str) -> Any:
        if name in _OURS:  # not made yet: being copied
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._inner, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is of the strategy, and not of a run of it that is under way."""
        return CapturedStrategy, (self._inner, *self._capture)

    def __repr__(self) -> str:
        return f"captured {self._inner!r}"


def _begun(captured: CapturedStrategy, *, stepwise: bool = False) -> Session:
    inner, (root, declared) = captured._inner, captured._capture
    key, examples = getattr(inner, "arrayrecord_key", None), getattr(inner, "weighted_by_key", None)
    session = Session(root, declared, (key, examples or "num-examples"), stepwise=stepwise)
    session.begin(type(inner).__name__, _recognised(captured))
    return session


def _watched(value: Any, session: Session) -> Any:
    """A grid, watched; everything else as it is."""
    if not isinstance(value, Grid):
        return value
    try:
        return WatchedGrid(value, session)
    except Exception as error:  # another version of Flower's, with methods that are not known here
        warn(f"nothing is captured of a {type(value).__name__}: {reason(error)}")
        return value


def _recognised(captured: CapturedStrategy) -> Recognised:
    """Flower's own defenses in the strategy and around it; none where that cannot be told."""
    try:
        return recognised(captured._inner, wrappers_around(captured))
    except Exception as error:
        warn(f"defenses of Flower's are not recognised: {reason(error)}")
        return Recognised()


def _noted(
    messages: Iterable[Message], session: Session, found: Recognised | None = None
) -> Iterable[Message]:
    messages = list(messages)
    session.sent(messages, found.norm if found is not None else None)
    return messages


class WatchedGrid(Grid):
    """A grid that hands on every message as it is, and notes it."""

    def __init__(self, inner: Grid, session: Session):
        own = vars(self)
        own["_inner"], own["_session"] = inner, session

    def set_run(self, run: Any) -> None:
        self._inner.set_run(run)

    @property
    def run(self) -> Any:
        return self._inner.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self._inner.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        return self._inner.get_node_ids()

    def get_nodes(self) -> Any:
        return self._inner.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._inner.push_messages(_noted(messages, self._session))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._heard(self._inner.pull_messages(message_ids))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        messages = _noted(messages, self._session)
        replies = self._heard(self._inner.send_and_receive(messages, timeout=timeout))
        if isinstance(replies, list):
            self._session.round_over()
        return replies

    def _heard(self, replies: Iterable[Message]) -> Iterable[Message]:
        """The replies as they come, noted; a list stays that list."""
        if not isinstance(replies, list):
            return self._listening(replies)
        for reply in replies:
            self._session.received(reply)
        return replies

    def _listening(self, replies: Iterable[Message]) -> Iterator[Message]:
        for reply in replies:
            self._session.received(reply)
            yield reply

    def __getattr__(self, name: str) -> Any:
        if name in _OURS:
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

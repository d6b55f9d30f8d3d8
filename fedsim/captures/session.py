"""Session: one run of an app as it is captured, from the first message to the last.

It is told of messages in the app's own threads, where it takes no more than references to what is
in them; everything else is the writer's. Nothing here raises: what goes wrong is a warning, an
event of the run, and a part of the capture that is missing.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Message, MessageType
from torch import Tensor

from fedsim.captures.arrays import (
    Arrays,
    Told,
    arrays_in,
    config_in,
    is_listed,
    nbytes,
    tensors_of,
    told_in,
    update_of,
)
from fedsim.captures.declaration import Declaration
from fedsim.captures.flower_defenses import KEY_CLIPPING_NORM, Recognised
from fedsim.captures.log import (
    Head,
    Messages,
    Reply,
    append_messages,
    here,
    index_path,
    write_head,
)
from fedsim.captures.trouble import reason, warn
from fedsim.captures.writer import Writer
from fedsim.core.errors import RunError
from fedsim.core.files import checksum, save_tensors, write_json
from fedsim.core.keyring import Keyring
from fedsim.core.observation import as_kept, write_weights
from fedsim.core.run import Run, observation_path, weights_path
from fedsim.core.run.paths import LOCK
from fedsim.core.sent import Shelf

MOST_NAMES = 1000  # directories of one name, numbered


@dataclass
class _Round:
    """A round under way; ``sent`` and what came of it are the writer's own."""

    about: Messages
    common: Arrays  # what most were sent
    own: dict[int, Arrays]  # by node, where that is something else
    replies: dict[int, Reply] = field(default_factory=dict)
    sent: dict[str, Tensor] = field(default_factory=dict)
    shelf: Shelf | None = None

    @property
    def over(self) -> bool:
        return all(reply.received is not None for reply in self.replies.values())


class Session:
    """What one run of an app sends and receives, kept in a directory of its own."""

    def __init__(
        self,
        wanted: Path,
        declaration: Declaration,
        keys: tuple[str | None, str],
        *,
        stepwise: bool = False,
    ):
        self.stepwise = stepwise  # told round by round: nobody says when it ends
        self._wanted, self._declaration = wanted, declaration
        self._key, self._examples = keys
        self._writer = Writer("capture", self._failed)
        self._lock = threading.Lock()
        self._leaving = ExitStack()
        self._run: Run | None = None
        self._head: Head | None = None
        self._rounds = 0
        self._apart = False  # clients are told different things, and that was noted
        self._now: _Round | None = None
        self._clients: dict[int, int] = {}
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._unsaid: list[tuple[str, str, dict[str, Any]]] = []

    # -- the app's own threads: quick, and nothing is raised --------------------------------------

    def begin(self, strategy: str, found: Recognised) -> None:
        with self._guarded("the capture cannot begin"):
            self._begin(strategy, found)
            if self.stepwise:
                atexit.register(self.end)

    def sent(self, messages: list[Message], norm: float | None = None) -> None:
        """``norm``: to which what comes back is clipped, where a wrapper around says so and the
        messages do not."""
        with self._guarded("what was sent is not kept"):
            asked = [m for m in messages if m.metadata.message_type.startswith(MessageType.TRAIN)]
            if asked and self._run is not None:
                self._open_round(asked, norm)

    def received(self, message: Message) -> None:
        with self._guarded("a reply is not kept"):
            if self._now is not None:
                self._take(self._now, message)

    def round_over(self) -> None:
        """All replies that were waited for are there."""
        with self._guarded("a round is not kept"):
            self._close_round()

    def end(self) -> None:
        with self._guarded("the capture has no end"):
            if self._run is None:
                return
            self._close_round()
            self._writer.submit("the end of the capture", self._finish)
            self._writer.settle()
        with contextlib.suppress(Exception):
            self._leaving.close()

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Any:
        try:
            with self._lock:
                yield
        except Exception as error:
            self._trouble("capture_failed", f"{what}: {reason(error)}")

    def _begin(self, strategy: str, found: Recognised) -> None:
        run = _claimed(self._wanted, self._leaving)
        root = run.root
        said = self._declaration
        self._head = Head(
            began=time.time(),
            host=here(),
            strategy=strategy,
            model=said.model,
            data=said.data,
            classes=said.classes,
            train=said.train,
            defenses=said.defenses,
            clipped=found.norm,
            app=said.app,
            folder=str(Path.cwd()),
            problems=said.problems,
        )
        self._run = run
        for problem in said.problems:
            self._trouble("declaration", problem)
        for sentence in found.sentences:
            self._note("flower_defense", sentence.removesuffix("."))
        if root != self._wanted:
            self._trouble(
                "capture_elsewhere",
                f"'{self._wanted}' holds something already; this run is captured in '{root}'",
            )
        self._head.signature = self._signature(run, self._head)
        try:
            write_head(root, self._head)
        except Exception:
            self._run = None  # without it the rest would be nothing
            self._leaving.close()
            raise
        _log(f"fedsim: this run is captured in {root}; afterwards: fedsim audit {root}")

    def _signature(self, run: Run, head: Head) -> str:
        try:
            return Keyring(run.vault).own().sign(*signed(head))
        except Exception as error:
            self._trouble("capture_unsigned", f"the capture is not signed: {reason(error)}")
            return ""

    def _open_round(self, asked: list[Message], norm: float | None) -> None:
        assert self._run is not None
        assert self._head is not None
        if self._head.run_id is None:
            self._announce(asked[0].metadata.run_id)
        now = self._now
        again = now is not None and any(m.metadata.dst_node_id in now.replies for m in asked)
        if now is not None and (again or now.over):
            self._close_round()
        began = time.time()
        taken = [(m.metadata.dst_node_id, m, arrays_in(m, self._key)) for m in asked]
        if self._now is None:
            self._rounds += 1
            _, _, common = taken[0]
            config = self._config(asked)
            if norm is not None:
                config.setdefault(KEY_CLIPPING_NORM, norm)
            number = config.get("server-round")
            about = Messages(
                round=self._rounds,
                server_round=number if isinstance(number, int) else None,
                began=began,
                ended=began,
                config=config,
                listed=is_listed(common),
            )
            self._now = _Round(about, common, {})
            self._write_sent(self._run, self._now)
        for node, _, arrays in sorted(taken, key=lambda one: one[0]):
            client = self._clients.setdefault(node, len(self._clients))
            self._now.replies[node] = Reply(node=node, client=client, sent=began)
            if not _same(arrays, self._now.common):
                self._now.own[node] = arrays

    def _config(self, asked: list[Message]) -> dict[str, Any]:
        """What the messages of a round say to every client alike."""
        first, *others = [config_in(message) for message in asked]
        alike = {k: v for k, v in first.items() if all(o.get(k) == v for o in others)}
        apart = sorted({key for one in (first, *others) for key in one} - alike.keys())
        if apart and not self._apart:
            self._apart = True
            words = f"not every client is told the same '{apart[0]}': it is not inferred"
            self._note("config_differs", words, round=self._rounds)
        return alike

    def _announce(self, run_id: int) -> None:
        """Tell the witnesses on this machine of the capture, before any of them trains."""
        assert self._run is not None
        assert self._head is not None
        self._head.run_id = run_id
        write_head(self._run.root, self._head)
        try:
            data = {key: self._head.data[key] for key in ("mean", "std") if key in self._head.data}
            write_json(index_path(run_id), {"root": str(self._run.root), **data})
        except OSError as error:
            self._trouble("witness_unaware", f"witnesses are not told: {reason(error)}")

    def _take(self, now: _Round, message: Message) -> None:
        reply = now.replies.get(message.metadata.src_node_id)
        if reply is None or reply.received is not None:
            return  # of another kind, or another round
        reply.received = time.time()
        if message.has_error():
            words = str(message.error.reason or "no reason given").strip().splitlines()[-1]
            reply.why = f"client {reply.client} failed: {words[:300]}"
            self._event("client_failed", now, reply)
            return
        try:
            arrays = arrays_in(message, self._key)
            told = told_in(message, self._examples)
        except Exception as error:
            reply.why = f"the reply of client {reply.client} is not kept: {reason(error)}"
            self._event("update_rejected", now, reply)
            return
        reply.examples, reply.loss = told
        if told.examples is None:
            words = f"the reply of client {reply.client} has no '{self._examples}'"
            self._note("no_examples", words, round=now.about.round, client=reply.client)
        size = nbytes(arrays)
        now.about.bytes += size

        def write() -> None:
            self._keep(now, reply, arrays)

        if not self._writer.submit(f"the update of client {reply.client}", write, size):
            reply.why = f"there was no room for the update of client {reply.client}"

    def _close_round(self) -> None:
        now, self._now = self._now, None
        if now is None:
            return
        now.about.ended = time.time()
        self._writer.submit(f"round {now.about.round}", lambda: self._log_round(now))

    # -- the writer's thread ----------------------------------------------------------------------

    def _write_sent(self, run: Run, now: _Round) -> None:
        def write() -> None:
            now.about.weights = False
            now.sent = tensors_of(now.common)
            shapes = {name: tuple(tensor.shape) for name, tensor in now.sent.items()}
            if self._shapes is None:
                self._shapes = shapes
                if _takes_grey(shapes):
                    words = "its first convolution takes one channel: grey pictures are not audited"
                    self._trouble("grey", words)
            if shapes != self._shapes:
                words = "the model has another shape than in the first round: it is not kept"
                self._note("shape_changed", words, round=now.about.round)
                return
            write_weights(run.observations, now.about.round, now.sent)
            now.about.weights = True

        what = f"what was sent in round {now.about.round}"
        if not self._writer.submit(what, write, nbytes(now.common)):
            now.about.weights = False

    def _keep(self, now: _Round, reply: Reply, arrays: Arrays) -> None:
        """Write one update, and what its client was sent if that was not the round's."""
        assert self._run is not None
        reply.why = f"the update of client {reply.client} is not kept"
        if not now.about.weights:
            return
        sent, own = now.sent, now.own.get(reply.node)
        if own is not None:
            chosen = tensors_of(own)
            if {n: t.shape for n, t in chosen.items()} != {n: t.shape for n, t in sent.items()}:
                reply.why = f"client {reply.client} was sent a model of another shape"
                self._event("update_rejected", now, reply)
                return
            folder = weights_path(self._run.observations, now.about.round).parent
            now.shelf = now.shelf or Shelf(folder)
            changed = {n: t for n, t in chosen.items() if not t.equal(sent[n])}
            reply.places, sent = now.shelf.store(changed), chosen
        try:
            received = tensors_of(arrays)
            if now.about.listed and is_listed(arrays) and len(arrays) != len(sent):
                raise ValueError(f"it has {len(arrays)} arrays, and {len(sent)} were sent")
            update = update_of(sent, received, Told(reply.examples, reply.loss))
        except Exception as error:
            reply.why = f"the reply of client {reply.client} is not kept: {reason(error)}"
            self._event("update_rejected", now, reply)
            return
        tensors = as_kept(update)
        path = observation_path(self._run.observations, now.about.round, reply.client)
        save_tensors(path, tensors)
        reply.checksum = checksum(tensors)
        if update.is_finite():
            reply.kept, reply.why = True, None
        else:
            reply.why = f"the update of client {reply.client} is not finite: it is not attacked"
            self._event("update_rejected", now, reply)

    def _log_round(self, now: _Round) -> None:
        assert self._run is not None
        now.sent, now.common, now.own = {}, {}, {}
        for reply in now.replies.values():
            if reply.received is None:
                reply.why = f"client {reply.client} did not answer"
                self._event("client_silent", now, reply)
        now.about.replies = sorted(now.replies.values(), key=lambda reply: reply.client)
        append_messages(self._run.root, now.about)

    def _finish(self) -> None:
        assert self._run is not None
        assert self._head is not None
        unsaid, self._unsaid = self._unsaid, []
        for kind, words, where in unsaid:  # the disk may have room again
            self._note(kind, words, **where)
        self._head.finished = True
        write_head(self._run.root, self._head)

    # -- trouble ----------------------------------------------------------------------------------

    def _failed(self, what: str, error: Exception) -> None:
        words = f"{what} could not be written: {reason(error)}"
        if isinstance(error, TimeoutError):  # in the app's thread: that disk has to wait
            warn(words)
            self._unsaid.append(("capture_failed", words, {}))
        else:
            self._trouble("capture_failed", words)

    def _event(self, kind: str, now: _Round, reply: Reply) -> None:
        self._note(kind, reply.why or kind, round=now.about.round, client=reply.client)

    def _trouble(self, kind: str, words: str) -> None:
        warn(words)
        self._note(kind, words)

    def _note(self, kind: str, words: str, **where: Any) -> None:
        try:
            if self._run is not None:
                self._run.note(kind, words, **where)
        except Exception:  # a full disk: said again at the end
            self._unsaid.append((kind, words, where))


def _takes_grey(shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether the first convolution is one of grey pictures."""
    return next((shape[1] == 1 for shape in shapes.values() if len(shape) == 4), False)


def signed(head: Head) -> tuple[bytes, str]:
    """What the capturer's key signs: the code that an audit may import, and from where."""
    content = {"model": head.model, "app": head.app, "defenses": head.defenses}
    content |= {"added": head.added} if head.added else {}
    return json.dumps(content, sort_keys=True).encode(), "capture"


def _same(one: Arrays, other: Arrays) -> bool:
    """Whether two messages carry the same arrays: as a rule they share them."""
    if one.keys() != other.keys():
        return False
    return all(
        array is other[name] or array.data is other[name].data or array.data == other[name].data
        for name, array in one.items()
    )


def _claimed(wanted: Path, leaving: ExitStack) -> Run:
    """The directory, made, and locked until ``leaving``; where it holds something already, or is
    another server's by now, the next of its name: -2, -3, ..."""
    for number in range(1, MOST_NAMES):
        root = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            root.mkdir(parents=True)
        except FileExistsError:
            if not root.is_dir() or any(root.iterdir()):
                continue
        if (run := _locked(Run(root), leaving)) is not None:
            return run
    raise FileExistsError(f"there are {MOST_NAMES} directories named like '{wanted}'")


def _locked(run: Run, leaving: ExitStack) -> Run | None:
    """The run, for this process alone; None where somebody else was faster."""
    with ExitStack() as trying:
        try:
            trying.enter_context(run.locked())
        except RunError:
            if (run.root / LOCK).is_file():
                return None
            raise
        if [path.name for path in run.root.iterdir()] != [LOCK]:
            return None  # it was, and has ended
        leaving.push(trying.pop_all())
    return run


def _log(words: str) -> None:
    """A line in Flower's own log, where whoever runs the app looks."""
    logging.getLogger("flwr").info(words)

"""Recorder: writes what the server sees to disk, in a thread of its own, while rounds go on.

One thread and one queue: what is on disk is always the beginning of what happened, without gaps.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsim.core.device import stand_back
from fedsim.core.learning import Update
from fedsim.core.observation import Public, write_observation, write_weights
from fedsim.core.run import Run, observation_path, weights_path
from fedsim.core.sent import Chosen, Places, Shelf

AHEAD = 6  # writes waiting; more would only fill memory
HELD_BYTES = 256 * 2**20  # updates of a round held for its aggregation; the rest is read back


class Recorder:
    """Keeps the observations of the audited rounds, and updates that do not fit in memory."""

    def __init__(
        self,
        run: Run,
        public: Public,
        rounds: list[int],
        masking: Callable[[int], list[int]] = lambda round_: [],
    ):
        self.run, self.public, self.rounds = run, public, set(rounds)
        self.masking = masking  # who masks their uploads together, by round
        # Clients on the same cores go first; there is time between the rounds.
        self._writer = ThreadPoolExecutor(1, "recorder", initializer=stand_back)
        self._room = threading.Semaphore(AHEAD)
        self._pending: list[Future[None]] = []
        self._held_bytes = 0
        self._broken = False
        self._shelf = Shelf(run.observations)
        self._chosen: dict[int, tuple[Chosen, Places]] = {}  # the writer's own

    def begin(
        self, round_: int, weights: dict[str, Tensor], memory: Mapping[str, Any] | None = None
    ) -> None:
        """A round starts: these weights are sent; ``memory`` is what an active server knows."""
        self._held_bytes = 0
        if round_ in self.rounds:
            self._submit(self._clear, round_)
            spec = self.run.present_digest()
            self._submit(write_weights, self.run.observations, round_, weights, memory, spec)

    def _clear(self, round_: int) -> None:
        folder = weights_path(self.run.observations, round_).parent
        self._shelf, self._chosen = Shelf(folder), {}

    def choose(
        self, round_: int, client: int, chosen: Chosen, changed: Mapping[str, Tensor]
    ) -> None:
        """A client is sent other weights than the round's: these tensors in their place."""
        if round_ not in self.rounds:
            return

        def store() -> None:
            self._chosen[client] = (chosen, self._shelf.store(changed))

        self._submit(store)

    def keep(
        self, round_: int, client: int, update: Update, then: Callable[[], None]
    ) -> Update | Path:
        """Take one reply, write it where it must stay; returns where to aggregate it from.

        ``then`` is called when its observation is on disk.
        """
        self._held_bytes += (size := update.nbytes())
        fits = self._held_bytes <= max(HELD_BYTES, size)
        observed = round_ in self.rounds
        root = self.run.observations if observed else self.run.spool
        if observed or not fits:
            public = self.public  # of this round

            def write() -> None:
                chosen, places = (
                    self._chosen.get(client, (None, None)) if observed else (None, None)
                )
                together = self.masking(round_) if observed else []
                write_observation(*(root, round_, client, update, public), chosen, places, together)
                if observed:
                    then()

            self._submit(write)
        if fits:
            return update
        self.settle()
        return observation_path(root, round_, client)

    def commit(self, write: Callable[[], None]) -> None:
        """A round is over: ``write`` says so on disk, after everything that belongs to it."""
        self._submit(write)
        self._submit(shutil.rmtree, self.run.spool, True)

    def settle(self) -> None:
        """Wait until everything is on disk; an error of the writer is raised here."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def _do(self, task: Callable[..., object], *args: object) -> None:
        if self._broken:  # a round with a hole must not be committed
            return
        try:
            task(*args)
        except BaseException:
            self._broken = True
            raise

    def _submit(self, task: Callable[..., object], *args: object) -> None:
        self._room.acquire()
        for done in [future for future in self._pending if future.done()]:
            self._pending.remove(done)
            done.result()
        future = self._writer.submit(self._do, task, *args)
        future.add_done_callback(lambda _: self._room.release())
        self._pending.append(future)

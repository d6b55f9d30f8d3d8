"""Witness: a client's own data loader, which yields what it yields, and is seen to.

    trainloader = fedsim.witness(trainloader, context)

What comes out of it goes to the client's own vault, encrypted, in a thread of its own: the truth
that an audit compares with. Where no witness stood there is none, and no scores.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from fedsim.captures.batches import Seen, seen_in
from fedsim.captures.log import here, remembered
from fedsim.captures.passes import NO_PASS, About, Pass, on_grid
from fedsim.captures.trouble import reason, warn
from fedsim.captures.writer import Writer
from fedsim.core.cache import cache_folder
from fedsim.core.vault import Vault

FOLDER, MOST = "FEDSIM_WITNESS", "FEDSIM_WITNESS_GB"
IN_CONFIG = "fedsim-witness"  # the same folder in an app's run config
MOST_GB = 1.0  # of one witness; while a pass is written, several times that is in memory
_NAMES: dict[int, tuple[weakref.ref[Any], str]] = {}  # of loaders, by their ids
_WRITERS: dict[int, Writer] = {}  # of this process; a fork has none of its parent's threads


def witness(
    trainloader: Any,
    context: Any,
    *,
    mean: Any = None,
    std: Any = None,
    vault: str | Path | None = None,
) -> Any:
    """The same loader, whose batches are kept in the vault of this client.

    ``context`` is Flower's, of the ClientApp. ``mean`` and ``std`` are those that pictures are
    normalised by, where no capture on this machine declares them. The vault is a folder of this
    node in ``vault``, in the app's run config under ``fedsim-witness``, in ``$FEDSIM_WITNESS``, or
    in fedsim's cache, where an audit on the same machine finds it. Wrap it where a round's training
    begins, and iterate over what is returned. Nothing that goes wrong here reaches the training.
    """
    try:
        if type(trainloader) is Witnessed:  # by another round, or another client: it has its own
            trainloader = vars(trainloader)["_loader"]
        keeper = Keeper.of(context, trainloader, mean, std, vault)
        keeper.announce()
        one_way = hasattr(type(trainloader), "__next__")
        return _Pass(trainloader, keeper) if one_way else Witnessed(trainloader, keeper)
    except Exception as error:
        warn(f"a loader has no witness: {reason(error)}")
        return trainloader


def witness_folder() -> Path:
    """Where witnesses keep what they see, unless they are told."""
    return Path(os.environ.get(FOLDER) or cache_folder() / "witness").expanduser()


def settle_witnesses() -> None:
    """Return when all that was seen in this process is kept."""
    writer = _WRITERS.get(os.getpid())
    if writer is not None:
        writer.settle()


class Witnessed:
    """A loader; every attribute is that of the wrapped one, and so is its class for whoever asks
    by `isinstance`."""

    def __init__(self, loader: Any, keeper: Keeper):
        own = vars(self)
        own["_loader"], own["_keeper"] = loader, keeper

    @property  # type: ignore[misc]  # Python's own way to stand for another object
    def __class__(self) -> Any:
        return type(self._loader)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Witnessed, (self._loader, self._keeper)

    def __iter__(self) -> Iterator[Any]:
        return _Pass(iter(self._loader), self._keeper)

    def __len__(self) -> int:
        return len(self._loader)

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __getitem__(self, key: Any) -> Any:
        return self._loader[key]

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_keeper"):  # not made yet: being copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._loader, name)


class _Pass:
    """One way through a loader."""

    def __init__(self, batches: Iterator[Any], keeper: Keeper):
        self._batches, self._keeper = batches, keeper
        self._number: int | None = None
        self._learned = False
        self._began = self._ended = time.time()

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        if self._number is None:
            self._number, self._began = self._keeper.open(), time.time()
        try:
            batch = next(self._batches)
        except BaseException as error:
            self._close(exhausted=isinstance(error, StopIteration))
            raise
        self._ended = time.time()
        # Asked before and after a batch is used: a loop may switch gradients off for each alone.
        self._learned = self._learned or torch.is_grad_enabled()
        self._keeper.note(self._number, batch)
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # as theirs: a TypeError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_batches", "_keeper"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def _close(self, *, exhausted: bool) -> None:
        number, self._number = self._number, -1
        if number is not None and number >= 0:
            self._ended = time.time() if exhausted else self._ended
            self._keeper.close(number, self._began, self._ended, exhausted, self._learned)

    def __del__(self) -> None:
        try:
            self._close(exhausted=False)
        except Exception:  # nobody is there any more to tell
            return


class Keeper:
    """What one witness has seen, and where it keeps that. Batches are noted in the loader's own
    thread, which copies them; all else is the writer's."""

    def __init__(self, vault: Vault, about: dict[str, Any], colours: tuple[Any, Any]):
        self._vault, self._about, self._colours = vault, about, colours
        self._passes = 0
        self._known: dict[bytes, int] = {}  # pictures with their labels, by hash
        self._count = 0
        self._open: dict[int, _Notes] = {}  # the writer's own
        self._most = float(os.environ.get(MOST) or MOST_GB) * 1e9
        self._kept = 0
        self._broken = False

    @classmethod
    def of(cls, context: Any, loader: Any, mean: Any, std: Any, vault: str | Path | None) -> Keeper:
        run_id, node_id = int(context.run_id), int(context.node_id)
        told = getattr(context, "run_config", {}).get(IN_CONFIG)
        base = Path(vault or told or witness_folder()).expanduser().absolute()
        partition = getattr(context, "node_config", {}).get("partition-id")
        announced = remembered(run_id)
        colours = (_three(mean or announced.get("mean")), _three(std or announced.get("std")))
        about = {
            "source": uuid.uuid4().hex,
            "loader": _named(loader),
            "run_id": run_id,
            "node_id": node_id,
            "partition": partition if isinstance(partition, int) else None,
            "host": here(),
        }
        return cls(Vault(base / str(run_id) / f"node-{node_id}"), about, colours)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is another witness, which numbers its own passes and pictures."""
        about = {**self._about, "source": uuid.uuid4().hex}
        return Keeper, (self._vault, about, self._colours)

    def announce(self) -> None:
        """Let it be known that somebody watches, whether or not anything is ever seen."""
        now = time.time()
        about: dict[str, Any] = {"number": NO_PASS, "began": now, "ended": now, "exhausted": False}
        lost = "no pass through its loader came to an end: a loop is at it, or it went another way"
        silent = Pass(About(**self._about, **about, lost=lost), *_Notes().tensors())
        self._writer().submit("word of itself", lambda: silent.write(self._vault))

    def open(self) -> int:
        self._passes += 1
        return self._passes

    def note(self, number: int, batch: Any) -> None:
        """A batch was yielded; whoever gets it may change it in place, so it is copied."""
        if self._broken:
            return
        try:
            seen = seen_in(batch)
            # Out of the accelerator's memory, which is theirs.
            copy = Seen(*(tensor.to("cpu", copy=True) for tensor in seen))
            size = copy.images.numel() * copy.images.element_size()
            if not self._writer().submit("a batch", lambda: self._take(number, copy), size):
                self._lose(number, "a batch could not be kept in time")
        except Exception as error:
            self._lose(number, f"a batch cannot be read: {reason(error)}")

    def close(
        self, number: int, began: float, ended: float, exhausted: bool, learned: bool
    ) -> None:
        """A pass is over: what it was goes to the vault."""
        try:
            about: dict[str, Any] = {"number": number, "began": began, "ended": ended}
            about |= {"exhausted": exhausted, "learned": learned}
            self._writer().submit("a pass", lambda: self._write(number, about))
        except Exception as error:
            warn(f"a witness's pass is lost: {reason(error)}", again=False)

    def _writer(self) -> Writer:
        return _WRITERS.setdefault(os.getpid(), Writer("witness", _failed))

    # -- the writer's thread ----------------------------------------------------------------------

    def _take(self, number: int, seen: Seen) -> None:
        notes = self._open.setdefault(number, _Notes())
        if notes.lost is None and self._kept > self._most:
            notes.lost = f"more than {self._most / 1e9:g} GB were seen; {MOST} says how many may be"
        if notes.lost is not None:
            return
        try:
            self._sort_in(notes, seen)
        except Exception as error:
            notes.lost = f"a batch cannot be kept: {reason(error)}"

    def _sort_in(self, notes: _Notes, seen: Seen) -> None:
        images, labels = seen.images.cpu(), seen.labels.cpu()
        mean, std = self._colours
        grid = on_grid(images, mean, std) if mean and std and images.shape[1] == len(mean) else None
        kept = grid if grid is not None else images
        rows = []
        for picture, label in zip(kept, labels, strict=True):
            own = picture.contiguous().numpy().tobytes() + label.numpy().tobytes()
            name = xxhash.xxh3_128_digest(own)
            row = self._known.get(name)
            if row is None:
                row = self._known[name] = self._count
                self._count += 1
                self._kept += picture.numel() * picture.element_size()
                notes.add(row, picture, label, stored=grid is not None)
            rows.append(row)
        notes.rows.append(rows)

    def _write(self, number: int, about: dict[str, Any]) -> None:
        notes = self._open.pop(number, _Notes())
        if self._broken and notes.lost is None:  # its later batches were not noted
            notes.lost = "what it saw before could not be kept"
        if not notes.rows and notes.lost is None:
            return
        mean, std = self._colours
        if notes.lost is not None:
            warn(f"a witness keeps nothing of a pass: {notes.lost}", again=False)
            notes.empty()
            self._known.clear()  # a later pass must not name a picture that was not kept
        whole = About(
            **self._about,
            **about,
            rows=notes.rows,
            stored=[row for row, _, _ in notes.stored],
            loose=[row for row, _, _ in notes.loose],
            mean=mean,
            std=std,
            lost=notes.lost,
        )
        try:
            Pass(whole, *notes.tensors()).write(self._vault)
        except Exception as error:
            self._broken = True
            # That it is missing has to be known, or the other passes look like all that there was.
            whole.lost = f"it could not be written: {reason(error)}"
            whole.rows, whole.stored, whole.loose = [], [], []
            with contextlib.suppress(Exception):
                Pass(whole, *_Notes().tensors()).write(self._vault)
            raise

    def _lose(self, number: int, why: str) -> None:
        warn(f"a witness keeps nothing of a pass: {why}", again=False)
        self._broken = True

        def lose() -> None:
            self._open.setdefault(number, _Notes()).lost = why

        self._writer().submit("a batch", lose)


class _Notes:
    """A pass as it grows: the numbers of the pictures in its batches, and those that are new."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.stored: list[tuple[int, Tensor, Tensor]] = []
        self.loose: list[tuple[int, Tensor, Tensor]] = []
        self.lost: str | None = None

    def add(self, row: int, picture: Tensor, label: Tensor, *, stored: bool) -> None:
        (self.stored if stored else self.loose).append((row, picture, label))

    def empty(self) -> None:
        self.rows, self.stored, self.loose = [], [], []

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        labels = [label for _, _, label in (*self.stored, *self.loose)]
        return _stack(self.stored), _stack(self.loose), _together(labels)


def _stack(pictures: list[tuple[int, Tensor, Tensor]]) -> Tensor:
    return torch.stack([p for _, p, _ in pictures]) if pictures else torch.zeros(0)


def _together(labels: list[Tensor]) -> Tensor:
    return torch.stack(labels) if labels else torch.zeros(0, dtype=torch.long)


def _named(loader: Any) -> str:
    """A name that no other loader of this process has: an id is given again, once one is gone. An
    iterator has that of torch's loader that it is of."""
    loader = getattr(loader, "_index_sampler", loader)
    known = _NAMES.get(id(loader))
    if known is not None and known[0]() is loader:
        return known[1]
    name = f"{os.getpid()}-{uuid.uuid4().hex}"
    try:
        _NAMES[id(loader)] = weakref.ref(loader), name
    except TypeError:  # a list, say
        return f"{os.getpid()}-{id(loader)}"
    return name


def _three(colour: Any) -> list[float] | None:
    if colour is None:
        return None
    numbers = [float(v) for v in (colour if isinstance(colour, list | tuple) else [colour])]
    return numbers * 3 if len(numbers) == 1 else numbers


def _failed(what: str, error: Exception) -> None:
    warn(f"a witness could not keep {what}: {reason(error)}", again=False)

"""Faults planted in a run, and how two runs are compared: for tests of what becomes of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

from fedsim.audit.stages import audit
from fedsim.core import files
from fedsim.core.files import UNFINISHED
from fedsim.core.run import Run
from fedsim.core.spec import Spec
from fedsim.scoring.scores import columns
from tests.conftest import small_spec

VIT = "model.options={patch_size: 8, depth: 1, embed_dim: 48, num_heads: 2}"
TRAIN = "{rounds: %d, clients_per_round: 2, lr: 0.05, evaluate: false}"
TINY = ["data.clients=2", f"train={TRAIN % 1}", VIT]
# A client that keeps a state of its own, an attack that fails: almost every kind of file there is.
RICH = [
    "data.clients=2",
    f"train={TRAIN % 2}",
    VIT,
    "defenses=[{name: top_k, sparsity: 0.5, feedback: true}]",
    "attacks=[{name: patch_solve}, {name: 'tests.faults:Declines'}]",
]


def tiny_spec() -> Spec:
    return small_spec(*TINY)


def numbers(run: Run) -> pd.DataFrame:
    return run.scores[[column for column in columns() if column != "seconds"]]


def resumed(root: Path) -> Run:
    run = Run.open(root)
    return audit(run.spec, root)


def assert_same(run: Run, control: Run) -> None:
    pd.testing.assert_frame_equal(numbers(run), numbers(control))
    assert not list(run.root.rglob(f"*{UNFINISHED}"))


class KilledError(BaseException):
    """As a kill is: nothing catches it, nothing is tidied up after it."""


@contextmanager
def at_write(
    number: int, fault: Callable[[Path], None], *, after: bool = False
) -> Iterator[list[str]]:
    """Let ``fault`` happen at the so-manieth file written; yields the names of those written."""
    written: list[str] = []
    replacing = files._replacing

    @contextmanager
    def faulty(path: Path, mode: int) -> Iterator[Path]:
        written.append(path.name)
        if len(written) == number and not after:
            fault(path)
        with replacing(path, mode) as temporary:
            yield temporary
        if len(written) == number and after:
            fault(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_replacing", faulty)
        yield written


def killed(path: Path) -> None:
    raise KilledError(path.name)


def killed_while_writing(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / f".{path.name}.k3x{UNFINISHED}").write_bytes(b"half of")
    raise KilledError(path.name)


def full(path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "deleted": lambda path: path.unlink(),
    "altered": lambda path: flip(path, path.stat().st_size - 3, 2),
    "emptied": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "endless": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
}


def flip(path: Path, at: int, bit: int) -> None:
    """Turn one bit of a file over."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)

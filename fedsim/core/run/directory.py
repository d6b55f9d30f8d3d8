"""Run: a directory that holds everything an experiment made. Every file is written atomically, and
one process works in it at a time."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from fedsim.core.errors import DamagedError, FedsimError, RunError
from fedsim.core.files import UNFINISHED, read_json, write_atomically, write_json
from fedsim.core.run.paths import (
    CANARIES,
    CHECKPOINT,
    EVENTS,
    GRID,
    LEARNED,
    LOCK,
    OBSERVATIONS,
    OFFLINE,
    POSITIONS,
    RECONSTRUCTIONS,
    RECORD,
    REDACTED_REPORT,
    REPORT,
    ROUNDS,
    SCORES,
    SPEC,
    SPOOL,
    SUMMARY,
    VAULT,
    observation_name,
    result_path,
)
from fedsim.core.spec import Spec, load_spec, written_digest
from fedsim.core.text import encoded, visible


class Run:
    """A run directory: where things are, and the small files that say how far it got."""

    def __init__(self, root: str | Path):
        self.root = Path(root)

    @classmethod
    def create(
        cls, root: str | Path, spec: Spec, *, deployed: bool = False, classes: int | None = None
    ) -> Run:
        """A new run, or the same one again: a directory of another spec is refused.

        ``deployed`` says that its clients are not simulated: what they did is not done again.
        ``classes`` is their number, for a server that has no data set to count them in.
        """
        run = cls(root)
        run.refuse_other(spec)
        try:
            if not run.spec_path.is_file() or not run._spec_is_whole():
                write_atomically(run.spec_path, spec.to_yaml().encode())
            if run._recorded_digest() is None:
                about = {"started": time.time(), "digest": spec.digest(), "deployed": deployed}
                write_json(run._about, about | ({"classes": classes} if classes else {}))
        except OSError as error:
            raise RunError(f"'{root}' cannot be written: {error.strerror}.") from error
        return run

    @classmethod
    def open(cls, root: str | Path) -> Run:
        run = cls(root)
        if not run.spec_path.is_file() and run._recorded_digest() is None:
            raise RunError(f"'{root}' holds no run (there is no {SPEC} in it).")
        if not run._spec_is_whole():
            raise RunError(
                f"'{run.spec_path}' is missing, damaged or not the one that the run began with; "
                f"give that again: fedsim audit SPEC -o {root}."
            )
        return run

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone in the directory. However the process ends, the system releases its lock."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunError(f"'{self.root}' cannot be written: {error.strerror}.") from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    owner = os.read(handle, 20).decode(errors="replace").strip()
                    raise RunError(
                        f"another process ({owner}) is at work in '{self.root}'; wait until it "
                        f"is done, or stop it."
                    ) from None
                # Otherwise the file system has no locks: then nobody can be kept out.
            os.truncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
            yield
        finally:
            os.close(handle)

    def refuse_other(self, spec: Spec) -> None:
        """Raise where the directory holds something other than a run of this spec."""
        digest = self._present_digest()
        if digest is not None and digest != spec.digest():
            raise RunError(
                f"'{self.root}' already holds a run of another spec ({digest}, not "
                f"{spec.digest()}); choose another directory or delete it."
            )
        if digest is not None:
            return
        if self.root.exists() and not self.root.is_dir():
            raise RunError(f"'{self.root}' is a file, not a directory.")
        if self.root.is_dir() and any(not _of_no_account(path) for path in self.root.iterdir()):
            raise RunError(
                f"'{self.root}' is not empty and holds no run; choose another directory."
            )

    def _present_digest(self) -> str | None:
        """The digest of the spec whose run the directory holds, None where it holds no run."""
        recorded = self._recorded_digest()
        if self.spec_path.is_file() and (recorded is None or self._spec_is_whole()):
            return self.spec.digest()
        return recorded

    def _recorded_digest(self) -> str | None:
        digest = self._recorded().get("digest")
        return digest if isinstance(digest, str) else None

    @property
    def deployed(self) -> bool:
        """Whether its clients ran elsewhere, under Flower's own launcher."""
        return bool(self._recorded().get("deployed"))

    @property
    def classes(self) -> int | None:
        """How many classes its clients have, where they alone hold the data; otherwise None."""
        count = self._recorded().get("classes")
        return count if isinstance(count, int) else None

    def _recorded(self) -> dict[str, Any]:
        try:
            about = read_json(self._about)
        except (FileNotFoundError, DamagedError):
            return {}
        return about if isinstance(about, dict) else {}

    def _spec_is_whole(self) -> bool:
        """Half a spec can still be a spec, of another experiment: the digest tells."""
        try:
            digests = (None, self.spec.digest(), written_digest(self.spec_path))
            return self._recorded_digest() in digests
        except FedsimError:
            return False

    @property
    def _about(self) -> Path:
        return self.root / RECORD

    @property
    def spec_path(self) -> Path:
        return self.root / SPEC

    @property
    def spec(self) -> Spec:
        return load_spec(self.spec_path)

    @property
    def observations(self) -> Path:
        return self.root / OBSERVATIONS

    @property
    def vault(self) -> Path:
        return self.root / VAULT

    @property
    def reconstructions(self) -> Path:
        return self.root / RECONSTRUCTIONS

    @property
    def learned(self) -> Path:
        """The memories of attacks that learn."""
        return self.root / LEARNED

    @property
    def checkpoint(self) -> Path:
        return self.root / CHECKPOINT

    @property
    def report(self) -> Path:
        return self.root / REPORT

    @property
    def redacted_report(self) -> Path:
        """The report for people who may not see the clients' data."""
        return self.root / REDACTED_REPORT

    @property
    def grid(self) -> Path:
        """The pictures of the strongest attack, beside the truth."""
        return self.root / GRID

    @property
    def canaries(self) -> Path:
        return self.root / CANARIES

    @property
    def spool(self) -> Path:
        """Updates of the round under way that are not kept as observations."""
        return self.root / SPOOL

    @property
    def offline(self) -> Path:
        """Results of attacks that were run again on what was captured."""
        return self.root / OFFLINE

    @property
    def positions(self) -> Path:
        """What was found out about the model's position embedding."""
        return self.root / POSITIONS

    @property
    def summary_path(self) -> Path:
        return self.root / SUMMARY

    @property
    def scores(self) -> pd.DataFrame:
        """One row per reconstructed image."""
        return self._table(SCORES)

    @property
    def rounds(self) -> pd.DataFrame:
        """One row per federated round."""
        return self._table(ROUNDS)

    @property
    def summary(self) -> dict[str, Any]:
        if not self.summary_path.is_file():
            raise RunError(f"'{self.root}' has no summary yet; run `fedsim audit --resume` on it.")
        content: dict[str, Any] = read_json(self.summary_path)
        return content

    def events(self) -> list[dict[str, Any]]:
        """Everything that went wrong and was survived, oldest first."""
        path = self.root / EVENTS
        if not path.is_file():
            return []
        lines = path.read_text(errors="replace").splitlines()
        events = [_event(line) for line in lines if line.strip()]
        whole = [event for event in events if event is not None]
        if len(whole) < len(events):
            lost = f"lines of {EVENTS} were damaged and are lost: {len(events) - len(whole)}"
            whole.append({"kind": "events_lost", "message": lost})
        return whole

    def note(self, kind: str, message: str, **where: Any) -> None:
        """Append to the run's events; the same event only once."""
        event = {"kind": kind, "message": visible(message), **where}
        known = self.events()
        if event not in known:
            lines = "".join(json.dumps(e) + "\n" for e in [*known, event])
            write_atomically(self.root / EVENTS, lines.encode())

    def write_table(self, name: str, table: pd.DataFrame, *, parquet: bool = False) -> None:
        write_atomically(self.root / f"{name}.csv", encoded(table.to_csv(index=False)))
        if parquet:
            buffer = io.BytesIO()
            table.to_parquet(buffer, index=False)
            write_atomically(self.root / f"{name}.parquet", buffer.getvalue())

    def _table(self, name: str) -> pd.DataFrame:
        path = self.root / name
        if not path.is_file():
            raise RunError(f"'{self.root}' has no {name} yet.")
        try:
            return pd.read_csv(path)
        except ValueError as error:
            raise DamagedError(
                f"'{path}' is damaged; run `fedsim audit --resume {self.root}`."
            ) from error

    def images(self, attack: str, round_: int, client: int, trial: int = 0) -> Tensor:
        """What an attack made of one update, (B, 3, H, W) in [0, 1], in the attack's own order."""
        from fedsim.core.attack import Reconstruction

        path = result_path(self.reconstructions, attack, round_, client, trial)
        if not path.is_file():
            name = observation_name(round_, client)
            raise RunError(f"'{self.root}' has no reconstruction by {attack} of {name}.")
        return Reconstruction.load(path).images

    def __repr__(self) -> str:
        return f"Run('{self.root}')"

    def _repr_html_(self) -> str:
        """For Jupyter: the verdicts, and where the report is."""
        if not self.summary_path.is_file():
            return f"<p><b>Run</b> <code>{escape(str(self.root))}</code>: not finished yet.</p>"
        rows = "".join(
            f"<tr><td><b>{escape(entry['verdict'])}</b></td><td>{escape(entry['words'])}</td></tr>"
            for entry in self.summary["verdicts"]
        )
        return (
            f"<p><b>Run</b> <code>{escape(str(self.root))}</code>, report: "
            f"<code>{escape(str(self.report))}</code></p><table>{rows}</table>"
        )


def _of_no_account(path: Path) -> bool:
    """What a process that was killed at its very beginning leaves behind."""
    return path.name == LOCK or path.name.endswith(UNFINISHED)


def _event(line: str) -> dict[str, Any] | None:
    """One line of the events, None where it is damaged."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(event, dict) and all(
        isinstance(event.get(key), str) for key in ("kind", "message")
    )
    return event if whole else None

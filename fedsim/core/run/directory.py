"""Run: a directory that holds everything an experiment made. Every file is written atomically, and
one process works in it at a time."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedsim.core.errors import DamagedError, FedsimError, RunError
from fedsim.core.files import (
    LINE_END,
    UNFINISHED,
    json_line,
    parse_json,
    read_json,
    write_atomically,
)
from fedsim.core.reading import MOST_JSON, read_file
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
from fedsim.core.run.record import Record, read_record, read_sheet, sheet_is_broken, write_record
from fedsim.core.run.rounds import read_rounds
from fedsim.core.spec import Spec, load_spec, written_digest
from fedsim.core.text import encoded, visible

if TYPE_CHECKING:
    import pandas as pd

_NOTING = threading.Lock()  # to note is to read and to write


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
        record = read_record(run.root)
        begun = run.checkpoint.is_file()
        if record is not None and record.spec is None:  # of a run from before, or written by hand
            if run._spec_is_whole():
                return run
            content = spec.model_dump(mode="json")
            record = replace(record, digest=record.digest or spec.digest(), spec=content)
        try:
            wrong = write_record(
                run.root, record or Record.of(spec, deployed=deployed, classes=classes)
            )
            for name in wrong if begun else []:
                run.note("mended", f"'{name}' was damaged and is written again", file=name)
        except OSError as error:
            raise RunError(f"'{root}' cannot be written: {error.strerror}.") from error
        return run

    @classmethod
    def open(cls, root: str | Path) -> Run:
        run = cls(root)
        if not run.spec_path.is_file() and read_record(run.root) is None:
            raise RunError(f"'{root}' holds no run (there is no {SPEC} in it).")
        run._refuse_lost()
        if not run._spec_is_whole():
            raise run._spec_lost()
        return run

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone in the directory. However the process ends, the system releases its lock.

        What lies in the lock's place may be from anybody: what a link leads to is never written.
        """
        lock, own = self.root / LOCK, os.getpid()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            handle = os.open(lock, flags, 0o644)
        except OSError as error:
            if error.errno == errno.ELOOP and lock.is_symlink():
                raise RunError(f"'{lock}' is a link, which no lock is: delete it.") from None
            raise RunError(f"'{self.root}' cannot be written: {error.strerror}.") from error
        try:
            about = os.fstat(handle)
            # A second name for a file of its reader's is no link that anybody could be shown.
            other = about.st_nlink > 1 and not os.pread(handle, 21, 0).strip().isdigit()
            if not stat.S_ISREG(about.st_mode) or other:
                raise RunError(f"'{lock}' is not a lock: delete it.")
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
            if (
                os.getpid() == own
            ):  # otherwise children that it forked meanwhile would go on with it
                with suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def refuse_other(self, spec: Spec) -> None:
        """Raise where the directory holds something other than a run of this spec."""
        self._refuse_lost()
        digest = self.present_digest()
        if digest is not None and digest != spec.digest():
            raise RunError(
                f"'{self.root}' already holds a run of another spec ({digest}, not "
                f"{spec.digest()}); choose another directory or delete it."
            )
        if digest is not None or read_record(self.root) is not None:
            return
        if self.root.exists() and not self.root.is_dir():
            raise RunError(f"'{self.root}' is a file, not a directory.")
        if self.root.is_dir() and any(not _of_no_account(path) for path in self.root.iterdir()):
            raise RunError(
                f"'{self.root}' is not empty and holds no run; choose another directory."
            )

    def present_digest(self) -> str | None:
        """The digest of the spec whose run the directory holds, None where it holds no run."""
        record = read_record(self.root)
        if self._spec_is_whole():
            return self.spec.digest()
        return record.digest if record else None

    @property
    def deployed(self) -> bool:
        """Whether its clients ran elsewhere, under Flower's own launcher."""
        self._refuse_lost()
        record = read_record(self.root)
        return record is not None and record.deployed

    @property
    def classes(self) -> int | None:
        """How many classes its clients have, where they alone hold the data; otherwise None."""
        record = read_record(self.root)
        return record.classes if record else None

    def _refuse_lost(self) -> None:
        """Raise where nothing is left that says whether the clients of a run were simulated: it
        must be taken for neither."""
        if read_record(self.root) is not None or not self.spec_path.is_file():
            return
        about, broken = self.root / RECORD, sheet_is_broken(read_sheet(self.root))
        if about.is_file() or broken or self.checkpoint.is_file():
            raise RunError(
                f"'{about}' is missing or damaged, and with it whether the clients of this run "
                f"were simulated: put it back from a copy, or write into it "
                f'{{"deployed": false}} if they were, {{"deployed": true}} if they ran elsewhere.'
            )

    def _spec_is_whole(self) -> bool:
        """Half a spec can still be a spec, of another experiment: seal and digest tell."""
        record = read_record(self.root)
        try:
            if record is not None and record.spec is not None:
                return self.spec.digest() is not None
            recorded = record.digest if record else None
            digests = (None, self.spec.digest(), written_digest(self.spec_path))
            return recorded in digests
        except FedsimError:
            return False

    def _spec_lost(self) -> RunError:
        return RunError(
            f"'{self.spec_path}' is missing, damaged or not the one that the run began with; "
            f"give that again: fedsim audit SPEC -o {self.root}."
        )

    @property
    def spec_path(self) -> Path:
        return self.root / SPEC

    @property
    def spec(self) -> Spec:
        """The spec that the run began with."""
        record = read_record(self.root)
        if record is not None and record.spec is not None:
            return load_spec(record.spec)
        sheet = read_sheet(self.root)
        if sheet is None or sheet_is_broken(sheet):
            raise self._spec_lost()
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
        try:
            return read_rounds(self.root, self.present_digest())
        except FileNotFoundError:
            raise RunError(f"'{self.root}' has no {ROUNDS} yet.") from None
        except DamagedError as error:
            raise self._damaged(self.root / ROUNDS) from error

    @property
    def summary(self) -> dict[str, Any]:
        if not self.summary_path.is_file():
            raise RunError(f"'{self.root}' has no summary yet; run `fedsim audit --resume` on it.")
        try:
            content: dict[str, Any] = read_json(self.summary_path)
        except DamagedError as error:
            raise self._damaged(self.summary_path) from error
        if not isinstance(content, dict) or not isinstance(content.get("verdicts"), list):
            raise self._damaged(self.summary_path)
        return content

    def scores_digest(self) -> str:
        """A hash of the scores as they lie; the summary that was made of them names it."""
        return hashlib.sha256((self.root / SCORES).read_bytes()).hexdigest()[:32]

    def is_concluded(self, spec: Spec) -> bool:
        """Whether its summary is sealed, of this spec, and made of the scores beside it."""
        try:
            summary = read_json(self.summary_path, unsealed=False)
            said = {key: summary.get(key) for key in ("spec_digest", "scores_digest")}
            return said == {"spec_digest": spec.digest(), "scores_digest": self.scores_digest()}
        except (DamagedError, AttributeError, OSError):
            return False

    def events(self) -> list[dict[str, Any]]:
        """Everything that went wrong and was survived, oldest first."""
        try:
            lines = read_file(self.root / EVENTS, MOST_JSON).split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            lost = f"{EVENTS} cannot be read and is lost: {error.strerror}"
            return [{"kind": "events_lost", "message": lost}]
        events = [_event(line) for line in lines if line.strip()]
        whole = [event for event in events if event is not None]
        if len(whole) < len(events):
            lost = f"lines of {EVENTS} were damaged and are lost: {len(events) - len(whole)}"
            whole.append({"kind": "events_lost", "message": lost})
        return whole

    def note(self, kind: str, message: str, **where: Any) -> None:
        """Append to the run's events; the same event only once."""
        event = {"kind": kind, "message": visible(message), **where}
        with _NOTING:
            known = self.events()
            if event not in known:
                lines = b"".join(json_line(e) for e in [*known, event])
                write_atomically(self.root / EVENTS, lines)

    def write_table(self, name: str, table: pd.DataFrame, *, parquet: bool = False) -> None:
        write_atomically(self.root / f"{name}.csv", encoded(table.to_csv(index=False)))
        if parquet:
            buffer = io.BytesIO()
            table.to_parquet(buffer, index=False)
            write_atomically(self.root / f"{name}.parquet", buffer.getvalue())

    def _table(self, name: str) -> pd.DataFrame:
        import pandas as pd  # half a second, which whoever only writes a run need not wait for

        path = self.root / name
        if not path.is_file():
            raise RunError(f"'{self.root}' has no {name} yet.")
        try:
            return pd.read_csv(io.BytesIO(read_file(path)))
        except (OSError, ValueError) as error:
            raise self._damaged(path) from error

    def _damaged(self, path: Path) -> DamagedError:
        return DamagedError(f"'{path}' is damaged; run `fedsim audit --resume {self.root}`.")

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


def _event(line: bytes) -> dict[str, Any] | None:
    """One line of the events, None where it is damaged."""
    try:
        event = parse_json(line + b"\n", "an event", LINE_END)
    except DamagedError:
        return None
    if not isinstance(event, dict):
        return None
    words = all(isinstance(event.get(key), str) for key in ("kind", "message"))
    numbers = all(type(event.get(key, 0)) in (int, type(None)) for key in ("round", "client"))
    plain = all(isinstance(v, str | int | float | None) for v in event.values())
    return event if words and numbers and plain else None

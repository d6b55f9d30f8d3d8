"""Run: a directory that holds everything an experiment made. Every file is written atomically.

spec.yaml run.json rounds.csv events.jsonl checkpoint.safetensors
observations/ vault/ reconstructions/ learned/ canaries.json
scores.csv scores.parquet summary.json report.html
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from safetensors.torch import save_file
from torch import Tensor

from fedsim.core.errors import RunError
from fedsim.core.spec import Spec, load_spec


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write all of ``content`` or nothing: a reader never sees half a file."""
    with _replacing(path, mode) as temporary:
        temporary.write_bytes(content)


@contextmanager
def _replacing(path: Path, mode: int) -> Iterator[Path]:
    """A temporary file beside ``path`` that becomes it when all went well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any, mode: int = 0o644) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode(), mode)


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    mode: int = 0o644,
) -> None:
    """Write tensors as safetensors, atomically."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with _replacing(path, mode) as temporary:
        save_file(whole, temporary, dict(metadata) if metadata else None)


class Run:
    """A run directory: where things are, and the small files that say how far it got."""

    def __init__(self, root: str | Path):
        self.root = Path(root)

    @classmethod
    def create(cls, root: str | Path, spec: Spec) -> Run:
        """A new run, or the same one again: another spec's directory is refused."""
        run = cls(root)
        if run.spec_path.exists():
            held = run.spec.digest()
            if held != spec.digest():
                raise RunError(
                    f"'{root}' already holds a run of another spec ({held}, not "
                    f"{spec.digest()}); choose another directory or delete it."
                )
            return run
        if run.root.exists() and not run.root.is_dir():
            raise RunError(f"'{root}' is a file, not a directory.")
        if run.root.is_dir() and any(run.root.iterdir()):
            raise RunError(f"'{root}' is not empty and holds no run; choose another directory.")
        try:
            write_atomically(run.spec_path, spec.to_yaml().encode())
        except OSError as error:
            raise RunError(f"'{root}' cannot be written: {error.strerror}.") from error
        write_json(run.root / "run.json", {"started": time.time(), "digest": spec.digest()})
        return run

    @classmethod
    def open(cls, root: str | Path) -> Run:
        run = cls(root)
        if not run.spec_path.is_file():
            raise RunError(f"'{root}' holds no run (there is no spec.yaml in it).")
        return run

    @property
    def spec_path(self) -> Path:
        return self.root / "spec.yaml"

    @property
    def spec(self) -> Spec:
        return load_spec(self.spec_path)

    @property
    def observations(self) -> Path:
        return self.root / "observations"

    @property
    def vault(self) -> Path:
        return self.root / "vault"

    @property
    def reconstructions(self) -> Path:
        return self.root / "reconstructions"

    @property
    def learned(self) -> Path:
        """The memories of attacks that learn."""
        return self.root / "learned"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint.safetensors"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def scores(self) -> pd.DataFrame:
        """One row a reconstructed image."""
        return self._table("scores.csv")

    @property
    def rounds(self) -> pd.DataFrame:
        """One row a federated round."""
        return self._table("rounds.csv")

    @property
    def summary(self) -> dict[str, Any]:
        path = self.root / "summary.json"
        if not path.is_file():
            raise RunError(f"'{self.root}' has no summary yet; run `fedsim audit --resume` on it.")
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    def events(self) -> list[dict[str, Any]]:
        """Everything that went wrong and was survived, oldest first."""
        path = self.root / "events.jsonl"
        if not path.is_file():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]

    def note(self, kind: str, message: str, **where: Any) -> None:
        """Append to the run's events, once each."""
        event = {"kind": kind, "message": message, **where}
        known = self.events()
        if event not in known:
            lines = "".join(json.dumps(e) + "\n" for e in [*known, event])
            write_atomically(self.root / "events.jsonl", lines.encode())

    def write_table(self, name: str, table: pd.DataFrame, *, parquet: bool = False) -> None:
        write_atomically(self.root / f"{name}.csv", table.to_csv(index=False).encode())
        if parquet:
            buffer = io.BytesIO()
            table.to_parquet(buffer, index=False)
            write_atomically(self.root / f"{name}.parquet", buffer.getvalue())

    def _table(self, name: str) -> pd.DataFrame:
        path = self.root / name
        if not path.is_file():
            raise RunError(f"'{self.root}' has no {name} yet.")
        return pd.read_csv(path)

    def images(self, attack: str, round_: int, client: int, trial: int = 0) -> Tensor:
        """What an attack made of one update, (B, 3, H, W) in [0, 1], in the attack's own order."""
        from fedsim.core.attack import Reconstruction
        from fedsim.core.observation import observation_name

        folder, name = self.reconstructions / attack, observation_name(round_, client)
        path = folder / f"{name}-trial-{trial}.safetensors"
        if not path.is_file():
            raise RunError(f"'{self.root}' has no reconstruction by {attack} of {name}.")
        return Reconstruction.load(path).images

    def __repr__(self) -> str:
        return f"Run('{self.root}')"

    def _repr_html_(self) -> str:
        """For notebooks: the verdicts, and where the report is."""
        path = self.root / "summary.json"
        if not path.is_file():
            return f"<p><b>Run</b> <code>{escape(str(self.root))}</code>: not finished yet.</p>"
        rows = "".join(
            f"<tr><td><b>{escape(entry['verdict'])}</b></td><td>{escape(entry['words'])}</td></tr>"
            for entry in self.summary["verdicts"]
        )
        return (
            f"<p><b>Run</b> <code>{escape(str(self.root))}</code>, report: "
            f"<code>{escape(str(self.report))}</code></p><table>{rows}</table>"
        )

"""Record: what a run is, kept twice: in run.json, and in the last line of spec.yaml.

Each of the two files is sealed and can be made again from the other, so that damage to one changes
neither the experiment nor whether its clients were simulated. A run from before has its spec in
spec.yaml alone and the rest in run.json alone; its files are taken as they are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedsim.core.errors import DamagedError, SpecError
from fedsim.core.files import (
    LINE_END,
    json_file,
    read_json,
    seal_is_broken,
    sealed_text,
    write_atomically,
)
from fedsim.core.reading import MOST_JSON, read_file
from fedsim.core.run.paths import RECORD, SPEC
from fedsim.core.spec import Spec, read_content

_MARK = "# "  # the line is a comment to whoever reads the spec
_SAYS = ("digest", "deployed")  # a record holds at least one of them


@dataclass(frozen=True)
class Record:
    """What a run is: which experiment, begun when, and whose clients take part."""

    started: float
    digest: str | None  # of the spec it began with
    deployed: bool  # whether its clients are not simulated
    classes: int | None = None  # where the clients alone hold the data
    spec: Mapping[str, Any] | None = None  # None in a run from before it was kept here

    @classmethod
    def of(cls, spec: Spec, *, deployed: bool, classes: int | None) -> Record:
        return cls(time.time(), spec.digest(), deployed, classes, spec.model_dump(mode="json"))

    @property
    def about(self) -> dict[str, Any]:
        """All but the spec."""
        about = {"started": self.started, "digest": self.digest, "deployed": self.deployed}
        return about | ({"classes": self.classes} if self.classes else {})


def read_record(root: Path) -> Record | None:
    """What a run's directory says it is, None where neither file does."""
    return _from_json(root / RECORD) or _from_sheet(root / SPEC)


def write_record(root: Path, record: Record) -> list[str]:
    """Write what is not as the record has it; returns the names of the files that were not."""
    found = {SPEC: _from_sheet(root / SPEC), RECORD: _from_json(root / RECORD)}
    wrong = [name for name, said in found.items() if said != record]
    for name in wrong:
        whole = json_file({**record.about, "spec": record.spec})
        write_atomically(root / name, _sheet(record) if name == SPEC else whole)
    return wrong


def sheet_is_broken(content: bytes | None) -> bool:
    """Whether a spec.yaml was sealed and is another now."""
    return content is not None and seal_is_broken(content, LINE_END)


def read_sheet(root: Path) -> bytes | None:
    """The content of a run's spec.yaml; None where it cannot be read."""
    try:
        return read_file(root / SPEC, MOST_JSON)
    except OSError:
        return None


def _sheet(record: Record) -> bytes:
    """The spec, and below it the rest of the record."""
    text = yaml.safe_dump(dict(record.spec or {}), sort_keys=False)
    return sealed_text(f"{text}{_MARK}{json.dumps({**record.about, 'seal': ''})}\n")


def _from_json(path: Path) -> Record | None:
    try:
        return _parsed(read_json(path))
    except (FileNotFoundError, DamagedError):
        return None


def _from_sheet(path: Path) -> Record | None:
    content = read_sheet(path.parent)
    if content is None or sheet_is_broken(content):
        return None
    _, mark, line = content.rstrip(b"\n").rpartition(b"\n" + _MARK.encode())
    try:
        about = json.loads(line) if mark else None
        return _parsed({**about, "spec": read_content(path)}) if about else None
    except (ValueError, TypeError, RecursionError, SpecError):  # a comment of somebody else's
        return None


def _parsed(about: Any) -> Record | None:
    """The record in a mapping; None where it is none."""
    if not isinstance(about, dict) or not any(key in about for key in _SAYS):
        return None
    started, digest, classes = (about.get(key) for key in ("started", "digest", "classes"))
    spec = about.get("spec")
    return Record(
        started=started if isinstance(started, float) else time.time(),
        digest=digest if isinstance(digest, str) else None,
        deployed=bool(about.get("deployed")),
        classes=classes if isinstance(classes, int) else None,
        spec=spec if isinstance(spec, dict) else None,
    )

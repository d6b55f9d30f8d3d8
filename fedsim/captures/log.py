"""Log: what a capture says of itself, and of every message, beside the tensors it kept.

``capture.json`` is written when a capture begins, and once more when it ends; ``messages.jsonl``
grows by a line with every round.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedsim.core.cache import cache_folder
from fedsim.core.errors import DamagedError, RunError
from fedsim.core.files import LINE_END, json_line, parse_json, read_json, write_json
from fedsim.core.reading import MOST_JSON, read_file
from fedsim.core.run import paths
from fedsim.core.sent import Places

FORMAT = 1
MOST = 100_000  # rounds, and clients: more than anybody trains, and few enough to count through


class Head(BaseModel):
    """What is known when a capture begins, and what was found out since."""

    model_config = ConfigDict(extra="ignore")

    format: int = FORMAT
    began: float
    host: str
    run_id: int | None = None  # Flower's
    strategy: str = ""
    model: dict[str, Any] = {}
    data: dict[str, Any] = {}
    classes: int | None = None
    train: dict[str, Any] = {}
    defenses: list[Any] = []
    clipped: float | None = None  # the norm to which a wrapper of Flower's has updates clipped
    app: str | None = None  # the folder in which the app's modules are found
    folder: str = ""  # that the capturing process was in
    signature: str = ""  # under the key of the run's vault: model and app are the capturer's own
    problems: list[str] = []
    finished: bool = False
    listed: tuple[str, ...] = ()  # the names of arrays that were sent without
    settled: dict[str, Any] = {}  # what the audit made of it
    added: dict[str, Any] = {}  # sections of a spec that were declared to the audit


class Reply(BaseModel):
    """One client's part in a round; times are the server's clock."""

    node: int
    client: Annotated[int, Field(ge=0, lt=MOST)]
    sent: float
    received: float | None = None
    kept: bool = False
    why: str | None = None  # there is no observation, or less of it
    examples: int | None = None
    loss: float | None = None
    checksum: str = ""
    places: Places | None = None  # of tensors that it was sent in place of the round's


class Messages(BaseModel):
    """One round: what was asked, and what came back."""

    round: Annotated[int, Field(ge=1, lt=MOST)]
    server_round: int | None = None
    began: float
    ended: float
    config: dict[str, Any] = {}
    listed: bool = False  # arrays without names
    weights: bool = True  # whether what was sent is on disk
    bytes: int = 0
    replies: list[Reply] = []


def here() -> str:
    """The machine at hand: on another, clocks differ."""
    return platform.node()


def head_path(root: Path) -> Path:
    return root / paths.CAPTURE


def is_capture(root: Path) -> bool:
    return head_path(root).is_file()


def write_head(root: Path, head: Head) -> None:
    write_json(head_path(root), head.model_dump(mode="json"))


def read_head(root: Path) -> Head:
    try:
        return Head.model_validate(read_json(head_path(root)))
    except FileNotFoundError:
        raise RunError(f"'{root}' holds no capture (there is no {paths.CAPTURE} in it).") from None
    except (DamagedError, ValidationError) as error:
        raise RunError(f"'{head_path(root)}' is damaged: capture the app once more.") from error


def append_messages(root: Path, messages: Messages) -> None:
    with (root / paths.MESSAGES).open("ab") as stream:
        stream.write(json_line(messages.model_dump(mode="json")))
        stream.flush()
        os.fsync(stream.fileno())


def read_messages(root: Path) -> tuple[list[Messages], int]:
    """The rounds of a capture in order, and how many lines of the log are damaged."""
    try:
        lines = read_file(root / paths.MESSAGES, MOST_JSON).split(b"\n")
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise RunError(f"'{root / paths.MESSAGES}' cannot be read: {error.strerror}.") from error
    found, damaged = [], 0
    for line in lines:
        if line.strip():
            try:
                content = parse_json(line + b"\n", "a line", LINE_END)
                found.append(Messages.model_validate(content))
            except (DamagedError, ValidationError):
                damaged += 1
    return found, damaged


def index_path(run_id: int) -> Path:
    """Where this machine notes the capture of one of Flower's runs, for its witnesses to find."""
    return cache_folder() / "captures" / f"{run_id}.json"


def remembered(run_id: int) -> dict[str, Any]:
    """What a capture on this machine noted for the witnesses of a run; nothing where none did."""
    try:
        content = read_json(index_path(run_id))
    except (OSError, DamagedError):
        return {}
    return content if isinstance(content, dict) else {}


def captured_elsewhere(name: str) -> Path | None:
    """The newest capture on this machine whose path ends in these words."""
    wanted = Path(name).parts
    found: list[tuple[float, Path]] = []
    for file in (cache_folder() / "captures").glob("*.json"):
        try:
            root = Path(str(read_json(file)["root"]))
            if root.parts[-len(wanted) :] == wanted and is_capture(root):
                found.append((file.stat().st_mtime, root))
        except (OSError, DamagedError, KeyError, TypeError):
            continue
    return max(found)[1] if found else None

"""Learned: what attacks that learn keep in memory, as pictures and curves."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from fedsim.clients.data.pictures import DAMAGED, decode
from fedsim.core.errors import DamagedError
from fedsim.core.files import read_json
from fedsim.core.reading import read_file
from fedsim.core.run import Run, list_lessons
from fedsim.report import plots
from fedsim.report.pictures import data_uri

NAME = re.compile(r"[\w.+-]+")  # of a memory; others are nobody's


@dataclass(frozen=True)
class Memory:
    """What an attack learned, to look at."""

    name: str
    picture: str
    size: tuple[int, int]
    words: str
    curve: Markup | None  # SVG of its losses


def learned(run: Run) -> list[Memory]:
    """The memories that hold a picture of what they know; one that is damaged is told."""
    folders = sorted(run.learned.glob("*")) if run.learned.is_dir() else []
    named = [folder for folder in folders if NAME.fullmatch(folder.name)]
    return [memory for folder in named if (memory := _memory(run, folder)) is not None]


def _memory(run: Run, folder: Path) -> Memory | None:
    try:
        lessons = [read_json(path) for path in list_lessons(folder)]
        if not (folder / "samples.png").is_file() or not lessons:
            return None
        picture = decode(read_file(folder / "samples.png"))
        losses = [(int(loss[0]), float(loss[1])) for lesson in lessons for loss in lesson["losses"]]
        notes = [lesson["notes"][-1] for lesson in lessons if lesson["steps"] and lesson["notes"]]
    except (*DAMAGED, DamagedError, KeyError, TypeError, OverflowError) as error:
        run.note("damaged", f"what '{folder.name}' learned is not shown: {error}")
        return None
    drawing = plots.trace(folder.name, [losses]) if losses else None
    words = str(notes[-1]) if notes else ""
    return Memory(folder.name, data_uri(picture), picture.size, words, drawing)

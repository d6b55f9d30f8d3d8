"""Learned: what attacks keep in memory of the traffic, as pictures and curves."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup
from PIL import Image

from fedsim.core.errors import DamagedError
from fedsim.core.files import read_json
from fedsim.core.run import Run, list_lessons
from fedsim.report import plots
from fedsim.report.pictures import data_uri


@dataclass(frozen=True)
class Memory:
    """What an attack learned from the traffic, to look at."""

    name: str
    picture: str
    size: tuple[int, int]
    words: str
    curve: Markup | None  # SVG of its matching losses


def learned(run: Run) -> list[Memory]:
    """The memories that hold a picture of what they know."""
    memories = []
    for folder in sorted(run.learned.glob("*")) if run.learned.is_dir() else []:
        if not (folder / "samples.png").is_file() or not list_lessons(folder):
            continue
        try:
            lessons = [read_json(path) for path in list_lessons(folder)]
            with Image.open(folder / "samples.png") as picture:
                picture.load()
        except (DamagedError, OSError, SyntaxError) as error:  # the last is Pillow's
            run.note("damaged", f"what '{folder.name}' learned is not shown: {error}")
            continue
        losses = [(int(loss[0]), float(loss[1])) for lesson in lessons for loss in lesson["losses"]]
        notes = [lesson["notes"][-1] for lesson in lessons if lesson["steps"] and lesson["notes"]]
        drawing = plots.trace(folder.name, [losses]) if losses else None
        words = notes[-1] if notes else ""
        memories.append(Memory(folder.name, data_uri(picture), picture.size, words, drawing))
    return memories

"""Learned: what attacks keep in memory of the traffic, as pictures and curves."""

from __future__ import annotations

import json
from dataclasses import dataclass

from markupsafe import Markup
from PIL import Image

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
        lessons = [json.loads(p.read_text()) for p in list_lessons(folder)]
        if not (folder / "samples.png").is_file() or not lessons:
            continue
        with Image.open(folder / "samples.png") as picture:
            picture.load()
        losses = [(int(loss[0]), float(loss[1])) for lesson in lessons for loss in lesson["losses"]]
        notes = [lesson["notes"][-1] for lesson in lessons if lesson["steps"] and lesson["notes"]]
        drawing = plots.trace(folder.name, [losses]) if losses else None
        words = notes[-1] if notes else ""
        memories.append(Memory(folder.name, data_uri(picture), picture.size, words, drawing))
    return memories

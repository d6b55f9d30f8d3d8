"""Memories in a report: what an attack learned, as a picture and a curve."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from fedsim.core.attack import Lesson
from fedsim.core.run import Run
from fedsim.report.learned import learned


def memory(run: Run, name: str, *, picture: bool = True, lessons: int = 2) -> Path:
    folder = run.learned / name
    folder.mkdir(parents=True)
    if picture:
        Image.new("RGB", (32, 16)).save(folder / "samples.png")
    for number in range(1, lessons + 1):
        notes = [f"learned on {number} observations"]
        losses = [[number, 1.0 / number]]
        Lesson(number, losses, ["traffic"], notes).save(folder / f"lesson-{number:04}.json")
    return folder


def test_a_memory_is_its_picture_its_last_words_and_its_curve(tmp_path: Path) -> None:
    run = Run(tmp_path)
    memory(run, "giml")
    (found,) = learned(run)
    assert (found.name, found.size) == ("giml", (32, 16))
    assert found.words == "learned on 2 observations"
    assert found.picture.startswith("data:image/png;base64,")
    assert found.curve is not None
    assert "<svg" in found.curve


def test_memories_without_a_picture_or_a_lesson_are_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert learned(run) == []
    memory(run, "blind", picture=False)
    memory(run, "new", lessons=0)
    assert learned(run) == []


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("samples.png", b"no picture"),
        ("lesson-0001.json", b"{"),
        ("lesson-0001.json", b"[]"),
        ("lesson-0002.json", b'{"losses": [[1]], "notes": [], "steps": 1}'),
        ("lesson-0002.json", b'{"losses": [[1e999, 1]], "notes": [], "steps": 1}'),
        ("lesson-0002.json", b'{"losses": 3}'),
    ],
)
def test_a_damaged_memory_is_left_out(tmp_path: Path, file: str, content: bytes) -> None:
    run = Run(tmp_path)
    memory(run, "whole")
    (memory(run, "damaged") / file).write_bytes(content)
    memory(run, "$\\frac")  # no name that an attack has
    assert [found.name for found in learned(run)] == ["whole"]

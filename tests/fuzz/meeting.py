"""How a loader meets its inputs: out comes a value or one sentence, and every input is counted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsim.core.errors import FedsimError
from fedsim.core.run import Run
from fedsim.core.text import visible

Check = Callable[[Any, Run], object]
Loaders = dict[str, tuple[st.SearchStrategy[Any], Check]]


def harmless(call: Callable[[], object]) -> bool:
    """Whether the call worked; an error must be one of ours, and one sentence that any terminal and
    any file can take."""
    try:
        call()
    except FedsimError as error:
        words = str(error)
    else:
        return True
    assert words
    assert "\n" not in words
    assert words == visible(words)
    return False


def with_file(path: Path, content: bytes, *calls: Callable[[], object]) -> None:
    """Calls that meet other content in the place of a file, which is put back."""
    held = path.with_name(f"{path.name}.held")
    shutil.move(path, held)
    try:
        path.write_bytes(content)
        for call in calls:
            harmless(call)
    finally:
        shutil.move(held, path)


def file_bytes(find: Callable[[Run], Path], read: Callable[[Run], object]) -> Check:
    """A check that edits the bytes of a file of the run."""

    def check(edit: Callable[[bytes], bytes], run: Run) -> None:
        path = find(run)
        with_file(path, edit(path.read_bytes()), lambda: read(run))

    return check


def fuzz(loaders: Loaders, loader: str, examples: int, run: Run) -> int:
    """How many inputs a loader met."""
    inputs, check = loaders[loader]
    met = 0

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,  # the same inputs every time, like everything here
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs)
    def meet(value: Any) -> None:
        nonlocal met
        met += 1
        check(value, run)

    meet()
    return met

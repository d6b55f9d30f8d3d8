"""Progress: a bar for work on many pictures, on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from fedsim.core.console import PlainConsole, column


@contextmanager
def bar(words: str, total: int | None, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of pictures just done."""
    console = PlainConsole(stderr=True)
    columns = column("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
    ) as progress:
        task = progress.add_task(words, total=total)
        yield lambda count: progress.advance(task, count)

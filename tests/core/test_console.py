"""The console: brackets are brackets, control characters are shown."""

from __future__ import annotations

import io

import pytest
from rich.progress import Progress
from rich.table import Table

from fedsim.core.console import PlainConsole, column, styled

ODD = ["no/such[/y]", "[bold]x[/]", "[", ":smile:", "\\[x]"]


def printed(*things: object, terminal: bool = False) -> str:
    stream = io.StringIO()
    console = PlainConsole(file=stream, width=120, force_terminal=terminal)
    console.print(*things, soft_wrap=True)
    return stream.getvalue()


@pytest.mark.parametrize("odd", ODD)
def test_brackets_are_printed_as_they_are(odd: str) -> None:
    assert printed(f"error: {odd}").strip() == f"error: {odd}"
    assert printed(styled(("error:", "bold red"), f" {odd}")).strip() == f"error: {odd}"
    table = Table("what")
    table.add_row(odd)
    assert odd in printed(table)


def test_what_somebody_else_says_does_not_steer_the_terminal() -> None:
    words = "\x1b[2J\x1b]0;x\x07 \udcff"
    for told in (printed(words), printed(styled(words))):
        assert told.strip() == r"\x1b[2J\x1b]0;x\x07 \xff"


def test_our_own_colours_are_still_shown() -> None:
    told = printed(styled(("error:", "bold red"), " x"), terminal=True)
    assert "\x1b[1;31merror:" in told


@pytest.mark.parametrize("odd", ODD)
def test_the_words_of_a_bar_are_plain(odd: str) -> None:
    stream = io.StringIO()
    with Progress(column("{task.description}", "dim"), console=PlainConsole(file=stream)) as bars:
        bars.add_task(odd, total=1)
    assert odd in stream.getvalue()

"""Console: how words reach a terminal. A bracket is a bracket, never markup, and a control
character is shown, never obeyed: file names and clients' errors are printed as they are."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import TextColumn
from rich.text import Text

from fedsim.core.text import visible


class PlainConsole(Console):
    """Takes every string for plain text, be it printed or in the cell of a table."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Words in a row, each plain or with a style of its own."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((visible(words), style) for words, style in pairs))


def column(form: str, style: str = "none") -> TextColumn:
    """A column of a bar whose words are plain text."""
    return TextColumn(form, style=style, markup=False)

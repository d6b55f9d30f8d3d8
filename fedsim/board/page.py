"""Page: the board as one file that opens offline, and as a table."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from fedsim.board.columns import COLUMNS, table_line
from fedsim.board.entries import Refused, read_entries
from fedsim.board.federations import Federation
from fedsim.board.pictures import Triple, fair_share, triples_of
from fedsim.board.rows import Row, rows_of
from fedsim.core.errors import RunError
from fedsim.core.files import write_atomically
from fedsim.core.text import encoded
from fedsim.report import HERE as REPORT
from fedsim.report import environment
from fedsim.report.pictures import icon

HERE = Path(__file__).parent
PAGE, REDACTED, TABLE = "board.html", "board-redacted.html", "board.csv"


@dataclass(frozen=True)
class Built:
    """What was written, what stands on it, and what does not."""

    page: Path
    table: Path
    rows: list[Row]
    refused: list[Refused]
    notes: list[str]


@dataclass(frozen=True)
class Line:
    """A row as the page shows it."""

    row: Row
    triples: list[Triple]
    why_none: str | None


def build_board(
    roots: Iterable[str | Path],
    output: str | Path,
    *,
    redacted: bool = False,
    trust: bool = False,
) -> Built:
    """`fedsim board build`: ``board.html`` and ``board.csv`` of these runs and benches.

    ``redacted``: ``board-redacted.html`` instead, without any picture. ``trust``: what the
    directories name by import path may be imported.
    """
    entries, refused, notes = read_entries(roots, trust=trust)
    if not entries:
        why = f": {refused[0].place}: {refused[0].why}" if refused else "."
        raise RunError(f"no run enters the board{why}")
    rows, output = rows_of(entries), Path(output)
    table = pd.DataFrame([table_line(row) for row in rows])
    write_atomically(output / TABLE, encoded(table.to_csv(index=False)))
    page = output / (REDACTED if redacted else PAGE)
    write_atomically(page, encoded(_page(rows, refused, notes, redacted=redacted)))
    return Built(page, output / TABLE, rows, refused, notes)


def _page(rows: list[Row], refused: list[Refused], notes: list[str], *, redacted: bool) -> str:
    share = 0 if redacted else fair_share(rows)
    lines = [_line(row, share, redacted=redacted) for row in rows]
    sections = [(f, list(own)) for f, own in groupby(lines, key=lambda line: line.row.federation)]
    script = (HERE / "board.js").read_text(encoding="utf-8")
    style = (REPORT / "style.css").read_text(encoding="utf-8")
    page = environment(HERE).get_template("board.html")
    content: dict[str, Any] = {
        "sections": sections,
        "columns": COLUMNS,
        "rows": rows,
        "refused": refused,
        "notes": notes,
        "redacted": redacted,
        "letters": sorted({federation.letter for federation, _ in sections}),
        "titles": _titles([federation for federation, _ in sections]),
        "icon": icon("NOT RECOVERED"),
        "style": Markup(style + (HERE / "board.css").read_text(encoding="utf-8")),
        "script": Markup(script),
        "script_hash": _hash(script),
    }
    return page.render(**content).lstrip()


def _line(row: Row, share: int, *, redacted: bool) -> Line:
    triples, why = ([], None) if redacted else triples_of(row, share)
    return Line(row, triples, why)


def _titles(federations: list[Federation]) -> dict[str, str]:
    """What each section is called; those that would be called the same are numbered."""
    titles: dict[str, str] = {}
    for federation in federations:
        title, number = federation.title, 1
        while title in titles.values():
            number += 1
            title = f"{federation.title} ({number})"
        titles[federation.key] = title
    return titles


def _hash(script: str) -> str:
    """By which the page's policy lets this script run, and no other."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()

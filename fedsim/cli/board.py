"""Commands of the board: build it, publish a run to be attacked, enter what others made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedsim.cli.shared import FAULTY, AsJson, Trust, err, opened, out
from fedsim.core.console import styled

app = typer.Typer()

board = typer.Typer(help="A public table of defenses that anyone may lower.")
app.add_typer(board, name="board")

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]


@board.command("build")
def build(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs and benches.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The board's directory.")],
    redact: Annotated[
        bool, typer.Option("--redact", help="A page without pictures, to be shown.")
    ] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """board.html and board.csv: each defense at its worst; exit code 3 where a run was refused."""
    from fedsim.board import build_board
    from fedsim.board.columns import COLUMNS, table_line

    built = build_board(runs, output, redacted=redact, trust=trust)
    if as_json:
        about = {
            "page": str(built.page),
            "rows": [table_line(row) for row in built.rows],
            "refused": [{"run": one.place, "reason": one.why} for one in built.refused],
            "notes": built.notes,
        }
        print(json.dumps(about, indent=2))
    else:
        shown = [c for c in COLUMNS if c.title in _BRIEF]
        table = Table("federation", "defense", *[column.title for column in shown], "")
        for row in built.rows:
            marks = [*dict.fromkeys(flag.flag for flag in row.flags)]
            mark = styled(
                (", ".join(marks), "magenta"), (" beaten" if row.dominated else "", "dim")
            )
            name = f"{row.defense} {row.strength}".strip()
            table.add_row(row.federation.key[:6], name, *[c.shown(row) for c in shown], mark)
        out.print(table)
        for one in built.refused:
            err.print(styled(("refused:", "yellow"), f" {one.place}: {one.why}"), soft_wrap=True)
        for note in built.notes:
            err.print(styled(("note:", "yellow"), f" {note}"), soft_wrap=True)
        out.print(f"board: {built.page}", soft_wrap=True, highlight=False)
    if built.refused:
        raise typer.Exit(FAULTY)


_BRIEF = ("Worst case, dB", "Best known, dB", "Recovered", "Accuracy kept")


@board.command("submit")
def submit(
    run: RunArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Reconstructions, as safetensors.")],
    name: Annotated[str, typer.Option("--name", help="Whose they are, as the board shows it.")],
    link: Annotated[
        str | None, typer.Option("--link", help="Where they are explained: http or https.")
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Score somebody's reconstructions of a published run; the board shows the best of them."""
    from fedsim.board import enter

    record = enter(opened(run, trust), file, name, link)
    if as_json:
        print(json.dumps(record.model_dump(mode="json"), indent=2))
        return
    table = Table("observation", "picture", "PSNR (dB)", "SSIM", "LPIPS", "identified", "recovered")
    for score in record.pictures:
        others = [score.lpips, score.identified]
        lpips, identified = ["–" if value is None else str(value) for value in others]
        about = f"round {score.round}, client {score.client}", str(score.image + 1)
        numbers = f"{score.psnr:.1f}", f"{score.ssim:.3f}", lpips, identified
        table.add_row(*about, *numbers, "yes" if score.recovered else "no")
    out.print(table)
    words = f"{record.attack} by {record.name} is entered; `fedsim board build` shows it."
    out.print(words, soft_wrap=True, highlight=False)


@board.command("export")
def export(
    run: RunArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="A new directory.")],
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """What others need to attack a run: its observations and what is public, nothing else."""
    from fedsim.board import publish

    done = publish(opened(run, trust), output)
    if as_json:
        about = {"published": str(done.root), "observations": done.observations}
        print(json.dumps({**about, "notes": done.notes}, indent=2))
        return
    for note in done.notes:
        err.print(styled(("note:", "yellow"), f" {note}."), soft_wrap=True)
    out.print(f"published: {done.root}", soft_wrap=True, highlight=False)

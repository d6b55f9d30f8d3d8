"""Commands that look: lint, view, list, doctor, analyze."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedsim.cli.shared import (
    AsJson,
    Output,
    Overrides,
    SpecArgument,
    Trust,
    captured_target,
    checked_spec,
    err,
    is_captured,
    out,
    tell_findings,
)
from fedsim.core.console import styled
from fedsim.core.errors import SpecError

app = typer.Typer()


@app.command()
def lint(
    spec: SpecArgument = None,
    overrides: Overrides = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", help="A rule to leave out; may be repeated.")
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """What is certain to leak, without a round: exit code 5 (certain), 4 (likely) or 0."""
    from fedsim.lint import lint as check

    if spec and is_captured(spec):
        checked, trust = captured_target(spec, overrides, None, None, None, None, trust)[0], True
    else:
        checked = checked_spec(spec, overrides)
    result = check(checked, ignore or [], trust=trust)
    if as_json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        tell_findings(result)
    raise typer.Exit(result.exit_code)


@app.command()
def view(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Runs, benches, or folders of them.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 0,
    host: Annotated[str, typer.Option(help="A loopback address.")] = "127.0.0.1",
) -> None:
    """Show runs in a browser, live and side by side; Ctrl-C ends it."""
    from fedsim.viewer.server import serve

    def tell(address: str) -> None:
        print(address, flush=True)
        err.print("Open it in a browser on this machine; Ctrl-C ends it.")

    try:
        serve(directories, host=host, port=port, ready=tell)
    except KeyboardInterrupt:
        err.print("stopped.")


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="attacks, suites, defenses, ... or models")] = "",
    as_json: AsJson = False,
) -> None:
    """What can be named in a spec."""
    from fedsim.tools.inventory import INVENTORY

    if what and what not in INVENTORY:
        raise SpecError(f"there is no list of '{what}'; there are: {', '.join(INVENTORY)}.")
    chosen = [what] if what else [kind for kind in INVENTORY if kind != "models"]
    lists = {kind: INVENTORY[kind]() for kind in chosen}
    if as_json:
        print(json.dumps(lists, indent=2))
        return
    for kind, rows in lists.items():
        table = Table(kind, "", box=None, padding=(0, 2))
        for name, words in rows.items():
            table.add_row(styled((name, "bold")), words)
        out.print(table)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """What this machine has: versions, device, Ray, weights, data."""
    from fedsim.tools.inventory import diagnose

    findings = diagnose()
    if as_json:
        print(json.dumps(findings, indent=2))
        return
    table = Table("what", "found", box=None, padding=(0, 2))
    for name, words in findings.items():
        table.add_row(styled((name, "bold")), words)
    out.print(table)


analyses = typer.Typer(help="Looks at trained models.")
app.add_typer(analyses, name="analyze")


@analyses.command("pe")
def analyze_positions(
    source: Annotated[Path, typer.Argument(help="A run directory, or a checkpoint in one.")],
    output: Output = None,
    pictures: Annotated[int, typer.Option(min=1, help="Test pictures to shuffle.")] = 256,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """What a ViT's position embedding holds, and how much the model leans on it."""
    from dataclasses import asdict

    from fedsim.tools.positions import analyse

    findings = analyse(source, output, pictures=pictures, trust=trust)
    if as_json:
        print(json.dumps(asdict(findings), indent=2))
        return
    table = Table("masking ratio", "Diff-norm", "Consistency", "accuracy")
    rows = zip(
        findings.ratios, findings.diff_norm, findings.consistency, findings.accuracy, strict=True
    )
    for ratio, apart, same, right in rows:
        table.add_row(f"{ratio:.1f}", f"{apart:.2f}", f"{100 * same:.0f} %", f"{100 * right:.0f} %")
    out.print(table)
    variance = ", ".join(
        f"{k}: {100 * share:.0f} %"
        for k, share in zip(findings.dimensions, findings.explained_variance, strict=True)
    )
    out.print(f"explained variance by directions: {variance}")
    out.print(
        f"place read from its embedding, mean error: {findings.mae_1d:.2f} patches along the "
        f"sequence, {findings.mae_2d:.3f} of a side in the grid",
    )

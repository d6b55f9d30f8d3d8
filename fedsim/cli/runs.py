"""Commands that run something: audit, run, bench, attack, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedsim.cli.shared import (
    FAULTY,
    AsJson,
    Output,
    Overrides,
    Resume,
    SpecArgument,
    Trust,
    captured_target,
    component_of,
    is_captured,
    opened,
    out,
    resumable,
    target,
    tell_events,
    tell_verdicts,
    watch_for,
)
from fedsim.core.console import styled
from fedsim.core.errors import FedsimError, SpecError

app = typer.Typer()


@app.command()
def audit(
    spec: SpecArgument = None,
    overrides: Overrides = None,
    output: Output = None,
    resume: Resume = None,
    trust: Trust = False,
    as_json: AsJson = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write events under DIR/tensorboard.")
    ] = False,
    attacks: Annotated[
        list[str] | None,
        typer.Option("--attack", help="Of a captured run: which attack; may be repeated."),
    ] = None,
    threat: Annotated[str | None, typer.Option(help="Of a captured run: A to E.")] = None,
    vaults: Annotated[
        list[Path] | None,
        typer.Option("--vault", help="Of a captured run: what witnesses elsewhere kept."),
    ] = None,
) -> None:
    """Rounds, attacks, scores, verdict, report; of a captured directory, all but the rounds."""
    from fedsim.audit.stages import audit as conduct
    from fedsim.audit.tensorboard import Events

    if spec and is_captured(spec) and resume is None:
        checked, root = captured_target(spec, overrides, output, attacks, threat, vaults, trust)
    elif attacks or threat or vaults:
        raise SpecError(
            "--attack, --threat and --vault are for a captured run: name its directory."
        )
    else:
        checked, root = target(spec, overrides, output, resume, trust)
    watch = watch_for(as_json)
    with resumable(root, checked):
        if tensorboard:
            run = conduct(
                checked,
                root,
                watch=(events := Events(watch, root)),
                willing=checked.captured is not None,
            )
            events.conclude(run)
        else:
            run = conduct(checked, root, watch=watch, willing=checked.captured is not None)
    summary = run.summary
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        tell_verdicts(summary)
        out.print(f"report: {run.report}", soft_wrap=True)
    if any(job["kind"] != "declined" for job in summary["failed_jobs"]):
        raise typer.Exit(FAULTY)


@app.command()
def run(
    spec: SpecArgument = None,
    overrides: Overrides = None,
    output: Output = None,
    resume: Resume = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Federated rounds only: rounds.csv and the observations."""
    from fedsim.audit.stages import federate

    checked, root = target(spec, overrides, output, resume, trust)
    with resumable(root, checked):
        done = federate(checked, root, watch=watch_for(as_json))
    if as_json:
        rows = json.loads(done.rounds.to_json(orient="records"))
        print(
            json.dumps({"run": str(done.root), "rounds": rows, "events": done.events()}, indent=2)
        )
        return
    tell_events(done.events())
    out.print(f"observations: {done.observations}", soft_wrap=True)


@app.command()
def bench(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="A spec with a section `bench`.")],
    overrides: Overrides = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The bench's directory; again to go on.")
    ] = Path("runs/bench"),
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed and two victims of each cell.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Attacks x defenses x strengths: leakage and accuracy in one table."""
    from fedsim.bench.cells import load_bench
    from fedsim.bench.measurement import conduct
    from fedsim.bench.table import by_cell
    from fedsim.core.metrics import shown_in

    checked = load_bench(spec, overrides or [], quick=quick)
    with watch_for(as_json).cells() as progress:
        table = conduct(checked, output, progress=progress)
    cells = by_cell(table)
    if as_json:
        print(json.dumps(cells, indent=2))
        return
    metrics = shown_in("headlines")
    titles = [metric.title for metric in metrics]
    shown = Table("defense", "strength", "strongest attack", *titles, "accuracy", "")
    for row in cells:
        accuracy = "" if row["accuracy"] is None else f"{100 * row['accuracy']:.0f} %"
        mark = styled(("front" if row["front"] else "", "green"), (row["doubts"], "magenta"))
        leakage = [_shown(row[metric.name], metric.headline_digits) for metric in metrics]
        about = row["defense"], row["strength"], row["attack"]
        shown.add_row(*about, *leakage, accuracy, mark)
    out.print(shown)
    for name in ("table.md", "frontier.png", "report.html"):
        out.print(f"{name}: {output / name}", soft_wrap=True)


def _shown(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


@app.command()
def attack(
    observation: Annotated[
        Path, typer.Argument(help="A captured observation, or a folder of them.")
    ],
    params: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="The attack's parameters.")
    ] = None,
    name: Annotated[str, typer.Option("--attack", help="Which; see `fedsim list attacks`.")] = "",
    output: Output = None,
    threat: Annotated[
        str | None, typer.Option(help="A to H; as in the run's spec if left out.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1)] = 1,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Replay an attack offline on what was captured."""
    from fedsim.audit.replay import attack_offline

    if not name:
        raise SpecError("say which attack: --attack NAME; `fedsim list attacks` shows them.")
    rows = attack_offline(
        observation,
        component_of(name, params or []),
        output,
        threat,
        trials,
        watch=watch_for(as_json),
        trust=trust,
    )
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        table = Table("observation", "trial", "PSNR (dB) of each image", "labels", "seconds")
        for row in rows:
            psnr = row["psnr"]
            scored = ", ".join(f"{p:.1f}" for p in psnr or []) or f"not scored: {row['unscored']}"
            labels = ", ".join(map(str, row["labels"] or [])) or "-"
            table.add_row(
                row["observation"],
                str(row["trial"]),
                row["failure"] or scored,
                labels,
                f"{row['seconds']:.2f}",
            )
        out.print(table)
        if pictures := [row["picture"] for row in rows if row["picture"]]:
            out.print(f"pictures: {Path(pictures[0]).parents[1]}", soft_wrap=True)
    if all(row["failure"] for row in rows):
        raise FedsimError(rows[0]["failure"])
    if any(row["failure"] for row in rows):
        raise typer.Exit(FAULTY)


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="A run directory.")],
    redact: Annotated[
        bool, typer.Option("--redact", help="One without the clients' pictures, to be shown.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Score again and rewrite the report from what the run holds."""
    from fedsim.audit.stages import conclude

    run = opened(directory, trust)
    with run.locked():
        path = conclude(run, watch=watch_for(False), redacted=redact)
    out.print(f"report: {path}", soft_wrap=True)

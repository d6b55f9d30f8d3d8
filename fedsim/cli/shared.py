"""Shared by the commands: their options, where a run goes, how results are told."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table

from fedsim import default_output
from fedsim.cli.signals import Stopped
from fedsim.core.console import PlainConsole, styled
from fedsim.core.errors import SpecError
from fedsim.core.run import Run
from fedsim.core.spec import Component, Spec, load_spec, read_value

if TYPE_CHECKING:
    from fedsim.lint import Lint

out, err = PlainConsole(), PlainConsole(stderr=True)

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
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run code that the directory or the spec names by import path."),
]

FAULTY = 3  # done, but some jobs crashed or met damaged files


def target(
    spec: str | None,
    overrides: list[str] | None,
    output: Path | None,
    resume: Path | None,
    trust: bool = False,
) -> tuple[Spec, Path]:
    """The spec to run and the directory to run it in."""
    if resume is not None:
        if spec or overrides or output:
            raise SpecError("--resume takes the directory alone: its spec is in there.")
        return opened(resume, trust).spec, resume
    checked = checked_spec(spec, overrides)
    return checked, output or default_output(checked)


def is_captured(spec: str) -> bool:
    """Whether a directory is named in place of a spec."""
    from fedsim import _is_directory

    return "=" not in spec and _is_directory(spec)


def captured_target(
    directory: str,
    overrides: list[str] | None,
    output: Path | None,
    attacks: list[str] | None,
    threat: str | None,
    vaults: list[Path] | None,
    trust: bool,
) -> tuple[Spec, Path]:
    """The spec of a captured run, and where it is audited; a YAML file may stand before the
    overrides."""
    from fedsim.audit.captured import bring_truths, settled

    changes = list(overrides or [])
    source = changes.pop(0) if changes and Path(changes[0]).is_file() else None
    changes += [f"threat={threat}"] if threat else []
    named = [{"name": name} for name in attacks or []]
    run, spec = settled(directory, source, changes, attacks=named, output=output, trust=trust)
    with run.locked():
        bring_truths(run, spec, vaults or [])
    return spec, run.root


def opened(directory: Path, trust: bool) -> Run:
    """The run of a directory, which names no code but ours unless it is trusted."""
    from fedsim.audit.captured import is_own
    from fedsim.audit.trust import named_in, refuse_strangers

    run = Run.open(directory)
    if is_own(run):
        return run
    refuse_strangers(directory, named_in(run), trust=trust)
    return run


def checked_spec(spec: str | None, overrides: list[str] | None) -> Spec:
    """The spec; its file may be left out before the overrides."""
    changes = list(overrides or [])
    if spec and "=" in spec and not Path(spec).is_file():
        changes, spec = [spec, *changes], None
    return load_spec(spec or {}, changes)


def component_of(name: str, params: list[str]) -> Component:
    try:
        return Component.model_validate({**values_of(params), "name": name})
    except ValidationError as error:
        first = error.errors()[0]
        about = f"'{first['loc'][-1]}': " if first["loc"] else ""
        raise SpecError(f"{about}{first['msg'].removeprefix('Value error, ')}.") from error


def values_of(params: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for param in params:
        key, equals, text = param.partition("=")
        if not equals:
            raise SpecError(f"'{param}' is not a parameter; write key=value.")
        values[key] = read_value(key, text)
    return values


def watch_for(as_json: bool) -> Any:
    from fedsim.campaign.progress import Bars, Silent

    return Silent() if as_json else Bars(err)


class resumable:  # noqa: N801 - reads as the statement it is
    """Ctrl-C inside, or a signal to end, says how to go on, and ends the process with every file
    whole."""

    def __init__(self, root: Path, spec: Spec):
        self.root, self.spec = root, spec

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if not isinstance(error, KeyboardInterrupt):
            return
        from fedsim.audit.trust import import_paths

        trust = " --trust" if import_paths(self.spec) else ""
        words = f"stopped; go on with: fedsim audit --resume {self.root}{trust}"
        err.print(words, soft_wrap=True)
        import ray

        ray.shutdown()
        sys.stderr.flush()
        code = error.exit_code if isinstance(error, Stopped) else 130
        os._exit(code)  # the runtime's threads would wait for rounds that will not come


def tell_verdicts(summary: dict[str, Any]) -> None:
    from fedsim.report.content import lines

    colours = {"LEAKS": "red", "PARTIAL": "yellow"}
    colours |= {"NOT SCORED": "blue"}
    colours |= dict.fromkeys(["MIS-SPECIFIED", "INCOMPLETE"], "magenta")
    suite = summary.get("suite")
    for entry in lines(summary["verdicts"], suite):
        colour = colours.get(entry["verdict"], "cyan")
        out.print(styled((entry["verdict"], f"bold {colour}"), f" {entry['words']}"))
    for flag in suite["flags"] if suite else []:
        out.print(styled(("flag", "bold magenta"), f" {flag['words']}"))
    tell_events(summary["events"])
    for job in summary["failed_jobs"]:
        if job["kind"] != "declined":
            err.print(styled(("failed:", "yellow"), f" {job['job']}: {job['reason']}"))


def tell_findings(result: Lint) -> None:
    colours = {"certain": "red", "likely": "yellow", "note": "cyan"}
    table = Table("", "rule", "why, and what would remove it", box=None, padding=(0, 2, 1, 0))
    for finding in result.findings:
        colour = colours[finding.severity]
        words = styled(finding.reason)
        if finding.remedy:
            words.append_text(styled(("\n" + " ".join(map(quoted, finding.remedy)), "green")))
        severity = styled((finding.severity, f"bold {colour}"))
        table.add_row(severity, styled((finding.rule, "bold")), words)
    if result.findings:
        out.print(table)
    counts: list[str] = [f.severity for f in result.findings]
    totals = ", ".join(f"{counts.count(severity)} {severity}" for severity in colours)
    out.print(f"{totals}. No finding is no promise: see docs/lint.md.")


def quoted(override: str) -> str:
    return f'"{override}"' if " " in override else override


def tell_events(events: list[dict[str, Any]]) -> None:
    for event in events:
        where = f"round {event['round']}: " if "round" in event else ""
        err.print(styled(("note:", "yellow"), f" {where}{event['message']}"))

"""The report: one HTML file that opens offline, verdict first. It is made from the run directory
alone, so that it can be written again a month later."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fedsim.campaign.jobs import Job
from fedsim.core.files import write_atomically
from fedsim.core.metrics import shown_in
from fedsim.core.run import Run
from fedsim.core.text import encoded
from fedsim.report import content, formats, headline, learned, membership, pictures, plots
from fedsim.scoring.vigilance import words_at

HERE = Path(__file__).parent


def write_report(run: Run, jobs: list[Job], *, redacted: bool = False) -> Path:
    """Write ``report.html``, and ``grid.png`` of the strongest attack where there is one.

    ``redacted``: ``report-redacted.html`` instead, to be shown to people who may not see the
    clients' data: no original, reconstructions as coarse mosaics, no labels, no names of files.
    """
    summary, scores, rounds = run.summary, run.scores, content.rounds_of(run)
    finding, baseline = headline.strongest(summary), headline.baseline_of(summary)
    attacks = content.ranked(summary["verdicts"])
    traces, notes = content.traces_and_notes(jobs, run.spec.seed)
    page = (
        environment()
        .get_template("template.html")
        .render(
            spec=run.spec,
            summary=summary,
            finding=finding,
            attacks=attacks,
            lines=content.lines(attacks, summary.get("suite")),
            baseline=baseline,
            redacted=redacted,
            hero=pictures.closest(run, jobs, scores, finding.attack, redacted=redacted),
            galleries=pictures.galleries(run, jobs, scores, attacks, redacted=redacted),
            unscored=pictures.unscored(run, jobs, attacks, redacted=redacted),
            population=content.exposed(summary),
            identification=content.identification(summary),
            suite=summary.get("suite"),
            comparisons=summary.get("comparisons", []),
            over_rounds=plots.over_rounds(summary.get("over_rounds", []), baseline),
            threat=content.threat_model(run.spec, summary),
            server=content.server(summary),
            noticed=summary.get("noticed"),
            noticed_at=partial(words_at, summary.get("noticed")),
            untried=content.untried(run.spec),
            privacy=content.privacy(summary),
            canary=content.canary(summary, scores),
            unavailable=content.unavailable(summary),
            troubles=content.troubles(summary),
            notes=notes,
            curves=plots.training(rounds),
            evaluated=rounds["test_accuracy"].notna().any(),
            strip=plots.strip(scores, [attack["attack"] for attack in attacks], baseline),
            learned=learned.learned(run),
            membership=membership.sections(run, attacks),
            traces={label: plots.trace(label, lines) for label, lines in traces.items()},
            facts=content.facts(run.spec, summary, scores),
            icon=pictures.icon(finding.verdict),
            style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
        )
    )
    path = run.redacted_report if redacted else run.report
    if not redacted:
        pictures.write_grid(run, jobs, scores, finding)
    write_atomically(path, encoded(page.lstrip()))
    return path


def environment(*folders: Path) -> Environment:
    """The templates of the report, and those in ``folders``, of pages that other packages make."""
    templates = Environment(
        loader=FileSystemLoader([*folders, HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= formats.FILTERS
    templates.globals |= {"shown_in": shown_in, "beside_psnr": formats.beside_psnr}
    return templates

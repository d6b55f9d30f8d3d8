"""Comparison of runs side by side: how their specs differ, what came out, the same pictures.

Two runs attacked the same picture only where its pixels say so: the same round and client of
another seed is another picture.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from fedsim.campaign.plan import jobs_of, victims
from fedsim.core.errors import RunError
from fedsim.core.metrics import METRICS, shown_in
from fedsim.core.run import Run, paths
from fedsim.core.spec import Spec
from fedsim.report.pictures import Pair, load_pairs, spread
from fedsim.scoring.recovery import RECOVERED_DB
from fedsim.scoring.statistics import KEYS, interval
from fedsim.viewer.charts import Interval, Series, curves, intervals
from fedsim.viewer.files import DAMAGE, Files, inside, reason
from fedsim.viewer.status import Outcome, Status, rounds_of, without_strangers

MOST_RUNS = 4
SHARED_SHOWN, OWN_SHOWN, ATTACKS_SHOWN = 6, 4, 3
HIGHEST_DB = 50.0  # of the scale; an exact copy stands beyond it
NOT_SET = "not set"


@dataclass(frozen=True)
class Cell:
    """A mean with its interval, as a table shows it; None where there is none."""

    mean: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """One attack in one run."""

    number: int
    outcome: Outcome | None
    metrics: dict[str, Cell]
    labels: Cell


@dataclass(frozen=True)
class Victim:
    """One picture that several runs attacked, and what each made of it."""

    pair: Pair  # of the first run: the original is the same in all
    guesses: list[tuple[int, Pair]]


@dataclass(frozen=True)
class Gallery:
    """Pictures of one attack: shared victims, or each run's own closest ones."""

    title: str
    victims: list[Victim]
    own: list[tuple[int, str, list[Pair]]]


@dataclass(frozen=True)
class Comparison:
    """Everything the page shows."""

    runs: list[Status]
    differences: list[tuple[str, list[str]]]
    attacks: list[tuple[str, list[Line]]]
    spans: Any  # a chart of the PSNR, None where there is none
    charts: list[tuple[str, Any]]
    galleries: list[Gallery]
    problems: list[tuple[int, str]]

    @property
    def several_updates(self) -> bool:
        outcomes = [line.outcome for _, lines in self.attacks for line in lines]
        return any(outcome is not None and outcome.victims > 1 for outcome in outcomes)


def compare(files: Files, runs: list[Status]) -> Comparison:
    """Lay these runs side by side; what cannot be read is reported beside what can."""
    problems = [(n, words) for n, run in enumerate(runs, 1) for words in run.problems]
    scores = {n: _scores(files, run, n, problems) for n, run in enumerate(runs, 1)}
    attacks = _attacks(runs, scores)
    return Comparison(
        runs,
        differences([run.spec for run in runs]),
        attacks,
        _spans(runs, attacks),
        _charts(files, runs),
        _galleries(runs, scores, problems),
        problems,
    )


def differences(specs: list[Spec | None]) -> list[tuple[str, list[str]]]:
    """The keys in which the specs differ, with each one's value."""
    flat = [_flat(spec.model_dump(mode="json")) if spec else {} for spec in specs]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    rows = [(key, [settings.get(key, NOT_SET) for settings in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(content: dict[str, Any], before: str = "") -> dict[str, str]:
    settings: dict[str, str] = {}
    for key, value in content.items():
        if isinstance(value, dict) and value:
            settings |= _flat(value, f"{before}{key}.")
        else:
            settings[f"{before}{key}"] = _as_words(value)
    return settings


def _as_words(value: Any) -> str:
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "; ".join(_as_words(one) for one in value)
    if isinstance(value, dict) and "name" in value:
        options = {k: v for k, v in value.items() if k != "name" and v is not None}
        words = ", ".join(f"{k} {_as_words(v)}" for k, v in options.items())
        return f"{value['name']} ({words})" if words else str(value["name"])
    if isinstance(value, dict):
        return ", ".join(f"{k} {_as_words(v)}" for k, v in value.items())
    return str(value)


def _scores(
    files: Files, run: Status, number: int, problems: list[tuple[int, str]]
) -> pd.DataFrame | None:
    if run.state != "finished":
        return None
    try:
        return files.parse(run.place.root, paths.SCORES, _score_table)
    except RunError as error:
        problems.append((number, reason(error)))
        return None


def _score_table(content: bytes) -> pd.DataFrame:
    table = pd.read_csv(io.BytesIO(content))
    headlines = [metric.name for metric in shown_in("headlines")]
    numeric = [*KEYS, "trial", *headlines, "label_true", "label_recovered"]
    lacking = [name for name in (*numeric, "attack") if name not in table.columns]
    if lacking:
        raise RunError(f"{paths.SCORES} has no column {lacking[0]}.")
    for name in numeric:
        table[name] = pd.to_numeric(table[name], errors="coerce")
    table = table.dropna(subset=[*KEYS, "trial", "attack"])
    return table.astype(dict.fromkeys([*KEYS, "trial"], int))


def _attacks(
    runs: list[Status], scores: dict[int, pd.DataFrame | None]
) -> list[tuple[str, list[Line]]]:
    """The attacks of all runs, the strongest finding first, the baseline last."""
    outcomes = sorted((o for run in runs for o in run.outcomes), key=lambda o: o.rank)
    last = sorted(outcomes, key=lambda outcome: outcome.baseline)
    names = list(dict.fromkeys(outcome.attack for outcome in last))
    rows = []
    for name in names:
        lines = []
        for number, run in enumerate(runs, 1):
            outcome = next((o for o in run.outcomes if o.attack == name), None)
            cells = {metric.name: _cell(outcome, metric.name) for metric in shown_in("viewer")}
            labels = _labels(outcome, scores[number])
            lines.append(Line(number, outcome, cells, labels))
        rows.append((name, lines))
    return rows


def _cell(outcome: Outcome | None, metric: str) -> Cell:
    statistics = outcome.metrics.get(metric, {}) if outcome else {}
    several = outcome is not None and outcome.victims > 1
    low, high = (statistics.get("low"), statistics.get("high")) if several else (None, None)
    return Cell(statistics.get("mean"), low, high)


def _labels(outcome: Outcome | None, scores: pd.DataFrame | None) -> Cell:
    """Labels that are right, with an interval like that of the metrics."""
    if outcome is None or outcome.label_accuracy is None:
        return Cell(None)
    rows = scores[scores["attack"] == outcome.attack] if scores is not None else None
    if rows is None or rows.empty or outcome.victims < 2:
        return Cell(outcome.label_accuracy)
    right = rows.assign(right=(rows["label_recovered"] == rows["label_true"]).astype(float))
    return Cell(outcome.label_accuracy, *interval(right, "right"))


def _charts(files: Files, runs: list[Status]) -> list[tuple[str, Any]]:
    rounds = {n: rounds_of(files, run.place) for n, run in enumerate(runs, 1)}

    def series(column: str, scale: float = 1.0) -> list[Series]:
        return [
            Series(n, runs[n - 1].place.name, points_of(rows, column, scale))
            for n, rows in rounds.items()
        ]

    drawn = [
        ("Test accuracy, %", curves(series("test_accuracy", 100.0), "Test accuracy", top=100.0)),
        ("Training loss", curves(series("train_loss"), "Training loss")),
    ]
    return [(title, drawing) for title, drawing in drawn if drawing is not None]


def _spans(runs: list[Status], attacks: list[tuple[str, list[Line]]]) -> Any:
    """Mean PSNR of each attack in each run, with its interval."""
    psnr = METRICS["psnr"]
    groups = [
        (
            name,
            [
                Interval(
                    line.number,
                    runs[line.number - 1].place.name,
                    cell.mean,
                    cell.mean if cell.low is None else cell.low,
                    cell.mean if cell.high is None else cell.high,
                )
                for line in lines
                if (cell := line.metrics[psnr.name]).mean is not None
            ],
        )
        for name, lines in attacks
    ]
    words = f"Mean {psnr.title} by attack"
    return intervals(groups, words, psnr.unit, RECOVERED_DB, HIGHEST_DB)


def points_of(
    rows: list[dict[str, float | None]], column: str, scale: float = 1.0
) -> list[tuple[float, float]]:
    """Round and value, where there is one."""
    points = []
    for row in rows:
        round_, value = row.get("round"), row.get(column)
        if round_ is not None and value is not None:
            points.append((round_, scale * value))
    return points


Loader = Callable[[pd.DataFrame], list[Pair]]


def _galleries(
    runs: list[Status],
    scores: dict[int, pd.DataFrame | None],
    problems: list[tuple[int, str]],
) -> list[Gallery]:
    tables = {n: table for n, table in scores.items() if table is not None and len(table)}
    if not tables:
        return []
    loaders = {n: _loader(runs[n - 1], table) for n, table in tables.items()}
    names = {n: [o.attack for o in runs[n - 1].verdicts if o.images] for n in tables}
    first = next(iter(names.values()))
    common = [a for a in first if all(a in others for others in names.values())]
    chosen: list[tuple[str, dict[int, str]]] = [
        (attack, dict.fromkeys(tables, attack)) for attack in common[:ATTACKS_SHOWN]
    ]
    if not chosen:
        chosen = [
            (
                "The strongest attack of each run",
                {n: ranked[0] for n, ranked in names.items() if ranked},
            )
        ]
    galleries = []
    for title, attacks in chosen:
        closest = {n: _closest_trials(tables[n], attack) for n, attack in attacks.items()}
        try:
            shared = _shared(closest, loaders) if len(closest) > 1 else []
        except DAMAGE:  # reported below, where each run is loaded by itself
            shared = []
        each = [] if shared else _each(closest, attacks, loaders, problems)
        if shared or any(pairs for _, _, pairs in each):
            galleries.append(Gallery(title, shared, each))
    return galleries


def _loader(run: Status, scores: pd.DataFrame) -> Loader:
    """Opens the pictures of some rows; only those that lie in the run's own directory."""
    spec, place = run.spec, run.place
    assert spec is not None

    def load(rows: pd.DataFrame) -> list[Pair]:
        opened = Run(place.root)
        wanted = {tuple(map(int, row)) for row in rows[["round", "client"]].to_numpy()}
        jobs = [
            job
            for job in jobs_of(
                opened, without_strangers(spec), [v for v in victims(spec) if v in wanted]
            )
            if inside(opened.reconstructions, job.result)
            and inside(opened.vault, opened.vault / f"{job.victim}.safetensors")
            and inside(opened.observations, job.observation)
        ]
        return load_pairs(opened, jobs, scores, rows)

    return load


def _closest_trials(table: pd.DataFrame, attack: str) -> pd.DataFrame:
    """One row per picture: of several trials, the closest."""
    rows = table[table["attack"] == attack].dropna(subset=["psnr"])
    best = rows.sort_values("psnr", ascending=False, kind="stable").drop_duplicates(KEYS)
    return best.set_index(KEYS, drop=False).rename_axis(["r", "c", "i"])


def _shared(closest: dict[int, pd.DataFrame], loaders: dict[int, Loader]) -> list[Victim]:
    """Pictures that every run attacked, spread from the closest to the farthest on average."""
    keys = set.intersection(*(set(table.index) for table in closest.values()))
    if not keys:
        return []
    means = pd.DataFrame(
        [(key, sum(float(t.loc[key, "psnr"]) for t in closest.values())) for key in sorted(keys)],
        columns=["key", "psnr"],
    )
    chosen = list(spread(means, SHARED_SHOWN)["key"])
    by_run: dict[int, dict[tuple[int, ...], Pair]] = {}
    for number, table in closest.items():
        rows = table.loc[chosen].reset_index(drop=True)
        by_run[number] = {
            tuple(int(pair.row[k]) for k in KEYS): pair for pair in loaders[number](rows)
        }
    shown = []
    for key in chosen:
        pairs = [(number, by_key[key]) for number, by_key in by_run.items() if key in by_key]
        if len(pairs) == len(closest) and all(_alike(pairs[0][1], pair) for _, pair in pairs):
            shown.append(Victim(pairs[0][1], pairs))
    return shown


def _alike(one: Pair, other: Pair) -> bool:
    return one.truth.shape == other.truth.shape and torch.equal(one.truth, other.truth)


def _each(
    closest: dict[int, pd.DataFrame],
    attacks: dict[int, str],
    loaders: dict[int, Loader],
    problems: list[tuple[int, str]],
) -> list[tuple[int, str, list[Pair]]]:
    """Each run's closest pictures."""
    shown = []
    for number, table in closest.items():
        rows = table.reset_index(drop=True).head(OWN_SHOWN)
        try:
            pairs = loaders[number](rows)
        except DAMAGE as error:
            problems.append((number, f"Its pictures cannot be shown: {reason(error)}"))
            pairs = []
        shown.append((number, attacks[number], pairs))
    return shown

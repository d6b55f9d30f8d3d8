"""The application: its routes, and what each page is given."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from fedsim.core.errors import RunError
from fedsim.core.run import paths
from fedsim.core.text import encoded
from fedsim.report import HERE as REPORT
from fedsim.report import environment
from fedsim.report.formats import count
from fedsim.viewer.access import REPORT_POLICY, AccessControl
from fedsim.viewer.charts import Series, curves, mark
from fedsim.viewer.comparison import MOST_RUNS, compare, points_of
from fedsim.viewer.files import Files, exists, read
from fedsim.viewer.run_index import Place, RunIndex
from fedsim.viewer.status import Status, events_of, failures_of, rounds_of, status_of

PAGES = Path(__file__).parent / "pages"
STATES = ["running", "stopped", "damaged", "planned", "trained", "finished"]  # as they are sorted
VERDICTS_SHOWN = 4


class Viewer:
    """What the routes answer with."""

    def __init__(self, directories: Iterable[str | Path]):
        self.run_index, self.files = RunIndex(directories), Files()
        self.pages = _pages()
        style = (REPORT / "style.css").read_text(encoding="utf-8")
        self.style = style + (PAGES / "view.css").read_text(encoding="utf-8")
        self.script = (PAGES / "live.js").read_text(encoding="utf-8")

    def index(self, request: Request) -> Response:
        shown: list[dict[str, Any]] = []
        states: Counter[str] = Counter()
        for group in self.run_index.groups():
            runs = [status_of(self.files, place) for place in group.runs]
            runs.sort(key=lambda run: (STATES.index(run.state), run.place.name))
            states.update(run.state for run in runs)
            report = group.bench and exists(group.root, paths.REPORT)
            shown.append({"about": group, "runs": runs, "report": report})
        counts = [f"{states[state]} {state}" for state in STATES if states[state]]
        roots = [str(root) for root in self.run_index.roots]
        return self._page(
            "index.html", groups=shown, counts=", ".join(counts), total=states.total(), roots=roots
        )

    def runs(self, request: Request) -> Response:
        runs = [status_of(self.files, place) for place in self.run_index.runs()]
        facts = json.dumps({"runs": [_facts(run) for run in runs]})
        return Response(facts, media_type="application/json")

    def run(self, request: Request) -> Response:
        return self._page("run.html", **self._about(self._place(request)))

    def live(self, request: Request) -> Response:
        """The part of a run's page that changes; its script asks for it."""
        return self._page("live.html", **self._about(self._place(request)))

    def report(self, request: Request) -> Response:
        return _report(self._place(request).root)

    def bench_report(self, request: Request) -> Response:
        bench = self.run_index.bench(request.path_params["key"])
        if bench is None:
            raise HTTPException(404, "There is no such bench here.")
        return _report(bench.root)

    def compare(self, request: Request) -> Response:
        keys = list(dict.fromkeys(request.query_params.getlist("run")))
        places = [self.run_index.run(key) for key in keys]
        if None in places:
            raise HTTPException(404, "One of these runs is not here; choose again.")
        if not 2 <= len(places) <= MOST_RUNS:
            raise HTTPException(400, f"Choose two to {MOST_RUNS} runs to lay side by side.")
        runs = [status_of(self.files, place) for place in places if place is not None]
        return self._page("compare.html", it=compare(self.files, runs))

    def asset(self, request: Request) -> Response:
        if request.url.path.endswith(".css"):
            return Response(self.style, media_type="text/css")
        return Response(self.script, media_type="text/javascript")

    def refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = error.detail if error.detail != "Not Found" else "There is no such page here."
        return self._page("refusal.html", error.status_code, words=words)

    def _about(self, place: Place) -> dict[str, Any]:
        run = status_of(self.files, place)
        rounds = rounds_of(self.files, place)
        drawn = [
            ("Test accuracy, %", _curve(run, rounds, "test_accuracy", 100.0, 100.0)),
            ("Training loss", _curve(run, rounds, "train_loss")),
        ]
        events, damaged = events_of(self.files, place)
        return {
            "run": run,
            "rounds": rounds,
            "charts": [(title, chart) for title, chart in drawn if chart is not None],
            "events": events,
            "damaged_events": damaged,
            "failures": failures_of(self.files, place) if run.jobs_failed else [],
        }

    def _place(self, request: Request) -> Place:
        place = self.run_index.run(request.path_params["key"])
        if place is None:
            raise HTTPException(404, "There is no such run here.")
        return place

    def _page(self, name: str, status: int = 200, /, **content: Any) -> Response:
        page = self.pages.get_template(name).render(**content).lstrip()
        return HTMLResponse(encoded(page), status)


def create_app(directories: Iterable[str | Path], token: str) -> AccessControl:
    """The viewer of these directories, behind its access control."""
    viewer = Viewer(directories)
    routes = [
        Route("/", viewer.index),
        Route("/api/runs", viewer.runs),
        Route("/runs/{key}", viewer.run),
        Route("/runs/{key}/live", viewer.live),
        Route("/runs/{key}/report", viewer.report),
        Route("/benches/{key}/report", viewer.bench_report),
        Route("/compare", viewer.compare),
        Route("/assets/view.css", viewer.asset),
        Route("/assets/live.js", viewer.asset),
    ]
    return AccessControl(
        Starlette(routes=routes, exception_handlers={HTTPException: viewer.refused}), token
    )


def _pages() -> Environment:
    """The report's environment, with the viewer's own pages."""
    pages = environment().overlay(loader=FileSystemLoader(PAGES))
    pages.globals |= {"mark": mark, "count": count, "VERDICTS_SHOWN": VERDICTS_SHOWN}
    return pages


def _report(root: Path) -> Response:
    """A report as it was written, in an origin of its own."""
    if not exists(root, paths.REPORT):
        raise HTTPException(404, "There is no report yet.")
    try:
        content = read(root, paths.REPORT)
    except RunError as error:
        raise HTTPException(404, str(error)) from error
    return HTMLResponse(content, headers={"Content-Security-Policy": REPORT_POLICY})


def _curve(
    run: Status,
    rounds: list[dict[str, float | None]],
    column: str,
    scale: float = 1.0,
    top: float | None = None,
) -> Any:
    series = Series(1, run.place.name, points_of(rounds, column, scale))
    return curves([series], column.replace("_", " ").capitalize(), top=top)


def _facts(run: Status) -> dict[str, Any]:
    """What the index shows of a run that may change."""
    verdicts = [{"attack": o.attack, "verdict": o.verdict} for o in run.verdicts]
    return {
        "key": run.place.key,
        "name": run.place.name,
        "state": run.state,
        "words": run.words,
        "ago": run.ago,
        "rounds": {"done": run.rounds_done, "total": run.rounds_total},
        "jobs": {"done": run.jobs_done, "failed": run.jobs_failed, "total": run.jobs_total},
        "verdicts": verdicts,
        "problems": run.problems,
        "report": run.report,
    }

"""Every table that is missing, several at a time, and the page of those that are done."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from experiments.papers.budget import BUDGET
from experiments.papers.kinds import Script, Source, Table
from experiments.papers.listed import TABLES
from fedsim.core.files import write_atomically

TIMES = "seconds.json"


def page(root: Path, seconds: dict[str, float]) -> str:
    """All tables that are done, each with its differences."""
    parts = ["# The papers' tables\n"]
    for table in TABLES:
        if not table.done(root):
            continue
        took = f", {seconds[table.name] / 60:.0f} minutes" if table.name in seconds else ""
        parts.append(f"\n## {table.name} (`{table.origin}`{took})\n")
        parts += [*table.lines(root), ""]
    return "\n".join(parts)


def missing(chosen: Sequence[Table | Script], root: Path) -> list[Table | Script]:
    return [table for table in chosen if not table.done(root)]


def ready(todo: Sequence[Table | Script], root: Path) -> list[Table | Script]:
    """Those whose own needs are done."""
    by_name = {table.name: table for table in TABLES}
    return [t for t in todo if all(by_name[name].done(root) for name in t.after)]


def run_missing(
    chosen: Sequence[Table | Script],
    root: Path,
    given: Mapping[Source, Sequence[str]],
    *,
    paper: bool,
    jobs: int,
) -> None:
    """Every table that is not there yet; the page grows with each."""
    log = root / TIMES
    seconds = json.loads(log.read_text()) if log.is_file() else {}
    todo = missing(chosen, root)
    count, done = len(todo), 0

    def run(table: Table | Script) -> float:
        began = time.perf_counter()
        table.run(root, given[table.data], paper=paper, jobs=jobs)
        return time.perf_counter() - began

    with ThreadPoolExecutor(jobs) as pool:
        running: dict[Future[float], Table | Script] = {}
        while (able := ready(todo, root)) or running:
            for table in able[: jobs - len(running)]:
                todo.remove(table)
                running[pool.submit(run, table)] = table
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name, done = running.pop(future).name, done + 1
                try:
                    seconds[name] = seconds.get(name, 0) + future.result()
                except subprocess.CalledProcessError as error:  # it has said why; the others go on
                    print(f"{done} of {count}: {name} ended with {error.returncode}", flush=True)
                    continue
                log.write_text(json.dumps(seconds))
                (root / "TABLES.md").write_text(page(root, seconds))
                print(f"{done} of {count}: {name}, {seconds[name] / 60:.0f} minutes", flush=True)
    for table in todo:
        waits = ", ".join(table.after)
        print(f"{table.name} waits for {waits}, which is not done", flush=True)
    (root / "TABLES.md").write_text(page(root, seconds))


def keep_budget(root: Path, budget: str) -> None:
    """One folder holds tables of one budget."""
    file = root / BUDGET
    if file.is_file() and (there := file.read_text().strip()) != budget:
        raise SystemExit(f"'{root}' holds tables at the {there} budget; give another folder.")
    write_atomically(file, f"{budget}\n".encode())

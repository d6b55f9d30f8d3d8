"""The papers' tables again, unattended: everything that is missing, then one page of tables.

    python -m experiments.papers -o DIR --cifar10 CIFAR10 --faces olivettifaces.mat
        [--only WORD ...] [--jobs N] [--paper] [--list]

What is done is not done again: the same command goes on after anything that stopped it; a folder
that holds a run of another spec than the one listed now is told, and never shown. ``--jobs``
runs so many tables at a time, each with its share of the processor. ``--paper`` takes the papers'
own budgets of attacks (`preset: paper`, for a GPU); what scripts train or search keeps its steps. A
table is an audit of one spec under `experiments/`, or what a script there prints; its page is
DIR/TABLES.md, with the time that each took.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from experiments.papers.budget import PAPERS, SMALL
from experiments.papers.data import Paths, prepare
from experiments.papers.kinds import Source
from experiments.papers.listed import TABLES
from experiments.papers.running import keep_budget, missing, run_missing


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--cifar10", type=Path, help="CIFAR-10: a tree, its batches or its zips")
    parser.add_argument("--faces", type=Path, help="olivettifaces.mat: 400 faces of 64 x 64")
    parser.add_argument("--only", nargs="*", default=[], help="tables whose name has one of these")
    parser.add_argument("--jobs", type=int, default=1, help="tables at a time")
    parser.add_argument("--paper", action="store_true", help="the papers' own budgets, for a GPU")
    parser.add_argument("--list", action="store_true", help="name the tables and end")
    asked = parser.parse_args()
    chosen = [t for t in TABLES if not asked.only or any(word in t.name for word in asked.only)]
    if asked.list:
        print("\n".join(f"{table.name}: {table.origin}" for table in chosen))
        return
    root = asked.output.absolute()
    root.mkdir(parents=True, exist_ok=True)
    keep_budget(root, PAPERS if asked.paper else SMALL)
    paths = Paths(*(path and path.absolute() for path in (asked.cifar10, asked.faces)))
    sources = dict.fromkeys(table.data for table in missing(chosen, root))
    for source in sources:
        paths.check(source)
    given: dict[Source, list[str]] = {}
    for source in sources:
        try:
            given[source] = prepare(source, paths, root)
        except subprocess.CalledProcessError as error:  # it has said why; the others go on
            print(f"the data of {source} ended with {error.returncode}", flush=True)
    able = [table for table in chosen if table.data in given or table.done(root)]
    run_missing(able, root, given, paper=asked.paper, jobs=asked.jobs)
    print(root / "TABLES.md")
    if left := missing(chosen, root):
        sys.exit(f"not done: {', '.join(table.name for table in left)}; run it again to go on.")


if __name__ == "__main__":
    main()

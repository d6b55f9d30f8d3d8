"""The papers' tables again, unattended: every audit that is missing, then one page of tables.

    python -m experiments.papers -o DIR --cifar10 CIFAR10 --faces olivettifaces.mat
        [--only WORD ...] [--jobs N] [--paper] [--list]

What is done is not done again: the same command goes on after anything that stopped it. ``--jobs``
runs so many tables at a time, each with its share of the processor. ``--paper`` takes the papers'
own budgets (`preset: paper`, for a GPU). Each table is an audit of one spec under `experiments/`;
its page is DIR/TABLES.md, with the time that each took.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.table import lines_of
from fedsim.attacks import create_attack
from fedsim.attacks.matching import PresetParameters
from fedsim.core.run import Run
from fedsim.core.spec import load_spec

HERE = Path(__file__).parent
TIMES = "seconds.json"
Source = Literal["cifar10", "faces", "largest", "random"]
# Trained on people whom nobody attacks (experiments/data/olivetti.py).
GENERATOR = ("--data", "imagefolder", "--steps", "1000", "channels=1", "width=24")


@dataclass(frozen=True)
class Table:
    """One audit: a spec, what is changed in it, and the attack that differences are taken from."""

    name: str
    spec: str
    overrides: tuple[str, ...] = ()
    against: str = "prior_only"
    data: Source = "cifar10"


def batch_sizes(spec: str, stem: str, sizes: tuple[int, ...]) -> list[Table]:
    return [
        Table(f"{stem}-batch-{size}", spec, (f"train.batch_size={size}", f"name=batch-{size}"))
        for size in sizes
    ]


PLAIN_APRIL = "april without its position term"
TABLES = [
    Table("gradvit-1-vit", "tables/vit.yaml", against="inverting_gradients"),
    Table("gradvit-1-vit-long", "tables/vit_long.yaml", against="inverting_gradients"),
    Table("gradvit-1-resnet", "tables/resnet.yaml"),
    Table("gradvit-2-terms", "tables/vit_terms.yaml", against="matching and TV"),
    Table("gradvit-4-5-layers", "tables/vit_layers.yaml", against="all layers"),
    *batch_sizes("tables/vit_batch.yaml", "gradvit", (1, 2, 4, 8)),
    Table("gradinversion-2-terms", "tables/resnet_terms.yaml", against="matching alone"),
    *batch_sizes("tables/resnet_batch.yaml", "gradinversion", (1, 2, 4, 8)),
    Table(
        "gradinversion-3-untrained",
        "tables/resnet_batch.yaml",
        ("model.checkpoint=null", "name=untrained"),
    ),
    *(
        Table(
            f"gradinversion-8-{which}",
            "tables/resnet_batch.yaml",
            ("data.name=imagefolder", f"name={which}"),
            data=which,
        )
        for which in ("largest", "random")
    ),
    Table("april-1-a", "tables/april_a.yaml", against=PLAIN_APRIL),
    Table("april-1-b", "tables/april_b.yaml", against=PLAIN_APRIL),
    Table("april-4-frozen", "tables/april_frozen.yaml"),
    Table("gias-1", "gias/table1.yaml", against="x", data="faces"),
]


def run_fedsim(*words: str, jobs: int = 1) -> None:
    """One command of fedsim in a process of its own, with its share of the processor."""
    share = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    command = [sys.executable, "-m", "fedsim.cli", *words]
    subprocess.run(command, check=True, cwd=HERE.parent, env=os.environ | share)


def run_table(table: Table, root: Path, overrides: Sequence[str], jobs: int = 1) -> float:
    """The audit of one table, gone on with where it stopped; seconds."""
    began = time.perf_counter()
    what = [str(HERE / table.spec), *table.overrides, *overrides, "-o", str(root)]
    if (root / "run.json").is_file():  # begun: its spec is in there
        what = ["--resume", str(root)]
    run_fedsim("audit", *what, jobs=jobs)
    return time.perf_counter() - began


def prepare(source: Source, path: Path, root: Path) -> list[str]:
    """What a data set needs before its tables, made once; the overrides that name it."""
    if source == "cifar10":
        return [f"data.path={path}"]
    if source in ("largest", "random"):
        trees = root / "vulnerable"
        if not (trees / source).is_dir():
            picking = ("pick", "--path", str(path), "-o", str(trees))
            command = [sys.executable, "-m", "experiments.vulnerable", *picking]
            subprocess.run(command, check=True, cwd=HERE.parent)
        return [f"data.path={trees / source}"]
    faces, generator = root / "faces", root / "faces.safetensors"
    if not (faces / "victims").is_dir():
        script = str(HERE / "data" / "olivetti.py")
        subprocess.run([sys.executable, script, str(path), "-o", str(faces)], check=True)
    if not generator.is_file():
        trained = ("--path", str(faces / "train"), "-o", str(generator))
        run_fedsim("generator", "train", *trained, *GENERATOR)
    return [f"data.path={faces / 'victims'}", f"threat.generator.checkpoint={generator}"]


TUNED = {"steps", "refine", "tv", "lr_z", "lr_w"}  # for a CPU, wherever they stand
WHOLE = 6500  # steps of GIAS in all, whatever it searches: 1,500 on z and 5,000 on w


def at_paper_budget(spec: Path) -> str:
    """An override that gives every attack of a spec its paper's budget; what sets the rows of a
    table apart, such as a term that is left out or a single seed, stays."""
    attacks = []
    for component in load_spec(spec).attacks:
        params = component.params
        kept = {k: v for k, v in params.items() if k not in TUNED or v == 0}
        if component.title is None:
            kept = {k: v for k, v in kept.items() if k not in ("seeds", "lr", "optimizer")}
        chosen = create_attack(component.name, **params)
        if isinstance(chosen, PresetParameters):
            kept["preset"] = "paper"
        else:  # without a paper's numbers it keeps its own
            kept = params
        if component.name == "gias" and "/" not in str(params["space"]):
            kept["steps"] = WHOLE
        title = {"title": component.title} if component.title else {}
        attacks.append({"name": component.name, **kept, **title})
    return f"attacks={json.dumps(attacks)}"


def page(root: Path, seconds: dict[str, float]) -> str:
    """All tables that are done, each with its differences."""
    parts = ["# The papers' tables\n"]
    for table in TABLES:
        folder = root / table.name
        if not (folder / "scores.csv").is_file():
            continue
        took = f", {seconds[table.name] / 60:.0f} minutes" if table.name in seconds else ""
        parts.append(f"\n## {table.name} (`experiments/{table.spec}`{took})\n")
        run = Run(folder)
        parts += ["\n".join(lines_of([run])), "", "\n".join(lines_of([run], table.against)), ""]
    return "\n".join(parts)


def missing(chosen: Sequence[Table], root: Path) -> list[Table]:
    return [table for table in chosen if not (root / table.name / "scores.csv").is_file()]


def run_missing(
    chosen: Sequence[Table], root: Path, given: dict[Source, list[str]], *, paper: bool, jobs: int
) -> None:
    """Every table that is not there yet; the page grows with each."""
    log = root / TIMES
    seconds = json.loads(log.read_text()) if log.is_file() else {}
    todo = missing(chosen, root)

    def run(table: Table) -> float:
        overrides = list(given[table.data])
        if paper:
            overrides.append(at_paper_budget(HERE / table.spec))
        return run_table(table, root / table.name, overrides, jobs)

    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(run, table): table for table in todo}
        for done, future in enumerate(as_completed(waiting), start=1):
            name = waiting[future].name
            try:
                seconds[name] = seconds.get(name, 0) + future.result()
            except subprocess.CalledProcessError as error:  # it has said why; the others go on
                print(f"{done} of {len(todo)}: {name} ended with {error.returncode}", flush=True)
                continue
            log.write_text(json.dumps(seconds))
            (root / "TABLES.md").write_text(page(root, seconds))
            print(f"{done} of {len(todo)}: {name}, {seconds[name] / 60:.0f} minutes", flush=True)
    (root / "TABLES.md").write_text(page(root, seconds))


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
        print("\n".join(f"{table.name}: experiments/{table.spec}" for table in chosen))
        return
    root = asked.output.absolute()
    root.mkdir(parents=True, exist_ok=True)
    given: dict[Source, list[str]] = {}
    for source in dict.fromkeys(table.data for table in missing(chosen, root)):
        path = asked.faces if source == "faces" else asked.cifar10
        if path is None or not path.exists():
            option = "faces" if source == "faces" else "cifar10"
            parser.error(f"these tables need --{option} PATH; choose others with --only")
        given[source] = prepare(source, path.absolute(), root)
    run_missing(chosen, root, given, paper=asked.paper, jobs=asked.jobs)
    print(root / "TABLES.md")
    if left := missing(chosen, root):
        sys.exit(f"not done: {', '.join(table.name for table in left)}; run it again to go on.")


if __name__ == "__main__":
    main()

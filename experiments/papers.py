"""The papers' tables again, unattended: every audit that is missing, then one page of tables.

    python -m experiments.papers -o DIR --cifar10 CIFAR10 [--only WORD ...] [--paper] [--list]

What is done is not done again: the same command goes on after anything that stopped it. ``--paper``
takes the papers' own budgets (`preset: paper`, for a GPU). Each table is an audit of one spec under
`experiments/`; its page is DIR/TABLES.md, with the time that each took.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from experiments.table import lines_of
from fedsim.core.run import Run
from fedsim.core.spec import load_spec

HERE = Path(__file__).parent
TIMES = "seconds.json"


@dataclass(frozen=True)
class Table:
    """One audit: a spec, what is changed in it, and the attack that differences are taken from."""

    name: str
    spec: str
    overrides: tuple[str, ...] = ()
    against: str = "prior_only"


def batch_sizes(spec: str, stem: str, sizes: tuple[int, ...]) -> list[Table]:
    return [
        Table(f"{stem}-batch-{size}", spec, (f"train.batch_size={size}", f"name=batch-{size}"))
        for size in sizes
    ]


TABLES = [
    Table("gradvit-1-vit", "tables/vit.yaml"),
    Table("gradvit-1-resnet", "tables/resnet.yaml"),
    Table("gradvit-2-terms", "tables/vit_terms.yaml"),
    Table("gradvit-4-5-layers", "tables/vit_layers.yaml", against="all layers"),
    Table("gradinversion-2-terms", "tables/resnet_terms.yaml", against="matching alone"),
    *batch_sizes("tables/resnet_batch.yaml", "gradinversion", (1, 2, 4, 8)),
]


def run_table(table: Table, root: Path, overrides: list[str]) -> float:
    """The audit of one table in a process of its own, gone on with where it stopped; seconds."""
    began = time.perf_counter()
    what = [str(HERE / table.spec), *table.overrides, *overrides, "-o", str(root)]
    if (root / "run.json").is_file():  # begun: its spec is in there
        what = ["--resume", str(root)]
    subprocess.run([sys.executable, "-m", "fedsim.cli", "audit", *what], check=True)
    return time.perf_counter() - began


def at_paper_budget(spec: Path) -> str:
    """An override that gives every attack of a spec its paper's budget."""
    attacks = []
    for component in load_spec(spec).attacks:
        kept = {k: v for k, v in component.params.items() if k not in ("steps", "seeds", "tv")}
        title = {"title": component.title} if component.title else {}
        attacks.append({"name": component.name, **kept, **title, "preset": "paper"})
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--cifar10", help="CIFAR-10: a tree, its batches or its zips")
    parser.add_argument("--only", nargs="*", default=[], help="tables whose name has one of these")
    parser.add_argument("--paper", action="store_true", help="the papers' own budgets, for a GPU")
    parser.add_argument("--list", action="store_true", help="name the tables and end")
    asked = parser.parse_args()
    chosen = [t for t in TABLES if not asked.only or any(word in t.name for word in asked.only)]
    if asked.list:
        print("\n".join(f"{table.name}: experiments/{table.spec}" for table in chosen))
        return
    if not asked.cifar10:
        parser.error("the tables need CIFAR-10: --cifar10 PATH")
    asked.output.mkdir(parents=True, exist_ok=True)
    log = asked.output / TIMES
    seconds = json.loads(log.read_text()) if log.is_file() else {}
    for number, table in enumerate(chosen, start=1):
        root = asked.output / table.name
        if (root / "scores.csv").is_file():
            continue
        print(f"\n{number} of {len(chosen)}: {table.name}", flush=True)
        overrides = [f"data.path={asked.cifar10}"]
        if asked.paper:
            overrides.append(at_paper_budget(HERE / table.spec))
        seconds[table.name] = seconds.get(table.name, 0) + run_table(table, root, overrides)
        log.write_text(json.dumps(seconds))
        (asked.output / "TABLES.md").write_text(page(asked.output, seconds))
    (asked.output / "TABLES.md").write_text(page(asked.output, seconds))
    print(asked.output / "TABLES.md")


if __name__ == "__main__":
    main()

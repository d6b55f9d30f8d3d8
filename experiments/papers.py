"""The papers' tables again, unattended: everything that is missing, then one page of tables.

    python -m experiments.papers -o DIR --cifar10 CIFAR10 --faces olivettifaces.mat
        [--only WORD ...] [--jobs N] [--paper] [--list]

What is done is not done again: the same command goes on after anything that stopped it. ``--jobs``
runs so many tables at a time, each with its share of the processor. ``--paper`` takes the papers'
own budgets (`preset: paper`, for a GPU). A table is an audit of one spec under `experiments/`, or
what a script there prints; its page is DIR/TABLES.md, with the time that each took.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.table import lines_of
from fedsim.attacks import create_attack
from fedsim.attacks.gias import Gias
from fedsim.attacks.matching import PresetParameters
from fedsim.core.files import write_atomically
from fedsim.core.run import Run
from fedsim.core.spec import load_spec

HERE = Path(__file__).parent
TIMES, PRINTED, BUDGET = "seconds.json", "table.md", "budget"
Source = Literal["cifar10", "faces", "domains", "largest", "random", "any"]
# Trained on people whom nobody attacks (experiments/data/olivetti.py), or on no people at all.
GENERATOR = ("--steps", "1000", "channels=1", "width=24")


@dataclass(frozen=True)
class Table:
    """One audit: a spec, what is changed in it, and the attack that differences are taken from.
    ``{root}`` in an override is the folder of all tables; ``after``: those that come first."""

    name: str
    spec: str
    overrides: tuple[str, ...] = ()
    against: str = "prior_only"
    data: Source = "cifar10"
    after: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        return f"experiments/{self.spec}"

    def done(self, root: Path) -> bool:
        """Scored, and no job crashed: one that did is tried again."""
        folder = root / self.name
        if not (folder / "scores.csv").is_file():
            return False
        jobs = Run(folder).summary.get("failed_jobs", [])
        return all(job.get("kind") == "declined" for job in jobs)

    def lines(self, root: Path) -> list[str]:
        run = Run(root / self.name)
        faces = self.data in ("faces", "domains")
        whole = lines_of([run], mean=faces)
        if self.against not in set(run.scores["attack"]):
            return [*whole, "", f"No differences: {self.against} has no result here."]
        return [*whole, "", *lines_of([run], self.against, mean=faces)]

    def run(self, root: Path, given: Sequence[str], *, paper: bool, jobs: int) -> None:
        """The audit, gone on with where it stopped."""
        folder = root / self.name
        if (folder / "run.json").is_file():  # begun: its spec is in there
            run_fedsim("audit", "--resume", str(folder), jobs=jobs)
            return
        overrides = [word.replace("{root}", str(root)) for word in self.overrides]
        if paper:
            overrides.append(at_paper_budget(HERE / self.spec))
        spec = str(HERE / self.spec)
        run_fedsim("audit", spec, *overrides, *given, "-o", str(folder), jobs=jobs)


@dataclass(frozen=True)
class Script:
    """What a script under `experiments/` prints as a table. In its words ``{path}`` is the data and
    ``{folder}`` a folder of its own, where it goes on from what is there."""

    name: str
    words: tuple[str, ...]
    data: Source = "any"
    after: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        return f"python -m experiments.{self.words[0]}"

    def done(self, root: Path) -> bool:
        return (root / self.name / PRINTED).is_file()

    def lines(self, root: Path) -> list[str]:
        return (root / self.name / PRINTED).read_text().splitlines()

    def run(self, root: Path, given: Sequence[str], *, paper: bool, jobs: int) -> None:
        folder = root / self.name
        folder.mkdir(parents=True, exist_ok=True)
        path = next((w.partition("=")[2] for w in given if w.startswith("data.path=")), "")
        words = [word.format(root=root, path=path, folder=folder) for word in self.words]
        command = [sys.executable, "-m", f"experiments.{words[0]}", *words[1:]]
        said = subprocess.run(
            command, check=True, cwd=HERE.parent, env=os.environ | share(jobs),
            stdout=subprocess.PIPE, text=True,
        ).stdout  # fmt: skip
        table = [line for line in said.splitlines() if line.startswith("|") or not line.strip()]
        write_atomically(folder / PRINTED, "\n".join(table).strip().encode() + b"\n")


def batch_sizes(spec: str, stem: str, sizes: tuple[int, ...]) -> list[Table]:
    return [
        Table(f"{stem}-batch-{size}", spec, (f"train.batch_size={size}", f"name=batch-{size}"))
        for size in sizes
    ]


def architecture(name: str, options: str) -> Table:
    """GradViT on another network of `experiments/checkpoints`."""
    checkpoint = f"model.checkpoint=experiments/checkpoints/{name}.safetensors"
    changed = (checkpoint, f"model.options={options}", f"name={name}")
    return Table(f"gradvit-3-{name}", "tables/vit_batch.yaml", changed)


def chain(depth: int) -> Table:
    """R-GAP on a plain network of so many convolutions."""
    layers = f"channels: {[24] * depth}, strides: {[1] * depth}, activation: leaky_relu"
    changed = (f"model.options={{{layers}}}", f"name=cnn{depth}")
    return Table(f"gias-a2-cnn{depth}", "gias/rgap_depth.yaml", changed, data="any")


def analytic(name: str, network: str, defenses: str) -> Table:
    """The analytic attack on a network that was trained for MJP's tables."""
    checkpoint = f"{{root}}/{ATTACKED}/vit4-plain/{network}-seed-0-steps-{BRIEF[1]}.safetensors"
    changed = (f"model.checkpoint={checkpoint}", f"defenses={defenses}", f"name={name}")
    return Table(f"mjp-5-{name}", "tables/mjp_trained.yaml", changed, after=(ATTACKED,))


PLAIN_APRIL = "april without its position term"
BRIEF = ("--steps", "1250")
ATTACKED = "mjp-5-networks"
SHUFFLED = "name: mjp, ratio: 0.9, probability: 1.0"
ANALYTIC = [
    analytic("a-plain", "A", "[]"),
    analytic("a-mjp", "J", "[{name: mjp, probability: 0}]"),
    analytic("b-plain", "A", f"[{{{SHUFFLED}, unknown: false, dal: none}}]"),
    analytic("b-mjp", "J", f"[{{{SHUFFLED}}}]"),
    analytic("c-mjp-unhidden", "J", f"[{{{SHUFFLED}, hide: false}}]"),
]
TABLES: list[Table | Script] = [
    Table("gradvit-1-vit", "tables/vit.yaml", against="inverting_gradients"),
    Table("gradvit-1-vit-long", "tables/vit_long.yaml", against="inverting_gradients"),
    Table("gradvit-1-resnet", "tables/resnet.yaml"),
    Table("gradvit-2-terms", "tables/vit_terms.yaml", against="matching and TV"),
    architecture("vit4", "{patch_size: 4, depth: 4, embed_dim: 96}"),
    architecture("vit8", "{patch_size: 8, depth: 6}"),
    architecture("vit8-small", "{patch_size: 8, depth: 4, embed_dim: 96}"),
    Table("gradvit-4-5-layers", "tables/vit_layers.yaml", against="all blocks"),
    *batch_sizes("tables/vit_batch.yaml", "gradvit", (1, 2, 4, 8)),
    Script("gradinversion-1-labels-and-closed-forms", ("closed_forms",)),
    Table("gradinversion-2-terms", "tables/resnet_terms.yaml", against="matching alone"),
    *batch_sizes("tables/resnet_batch.yaml", "gradinversion", (1, 2, 4, 8, 16)),
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
    Table(
        "april-1-b-longer",
        "tables/april_b.yaml",
        (
            "attacks=[{name: idlg, steps: 1000}, {name: april, steps: 1000, alpha: 0.01}]",
            "name=longer",
        ),
    ),
    Table("april-4-frozen", "tables/april_frozen.yaml"),
    Script(
        "mjp-2-3-vit",
        (*("mjp", "cifar10", "--path", "{path}", "-o", "{folder}"), *BRIEF, "--seeds", "1"),
        "cifar10",
    ),
    *(
        Script(
            f"mjp-1-{network}",
            (
                *("mjp", "cifar10", "--network", network, "--path", "{path}", "-o", "{folder}"),
                *(*BRIEF, "--seeds", "3", "--only", "A", "--only", "E"),
            ),
            "cifar10",
        )
        for network in ("resnet", "swin")
    ),
    Script(
        ATTACKED,
        (
            *("mjp", "cifar10", "--network", "vit4-plain", "--path", "{path}", "-o", "{folder}"),
            *(*BRIEF, "--seeds", "1", "--only", "A", "--only", "J:"),
        ),
        "cifar10",
    ),
    *ANALYTIC,
    Script(
        "mjp-5-inputs",
        ("mjp", "inputs", *(f"{{root}}/{table.name}" for table in ANALYTIC)),
        after=tuple(table.name for table in ANALYTIC),
    ),
    Table("gias-1", "gias/table1.yaml", against="x", data="faces"),
    Table("gias-3-underdetermined", "gias/underdetermined.yaml", against="x", data="faces"),
    *(
        Table(
            f"gias-5-{word}",
            "gias/underdetermined.yaml",
            (change, f"name={word}"),
            against="x",
            data="faces",
        )
        for word, change in (
            ("batch-4", "train.batch_size=4"),
            ("sparse", "defenses=[{name: top_k, sparsity: 0.9}]"),
            ("noise", "defenses=[{name: gaussian_noise, std: 0.3, relative: true}]"),
        )
    ),
    Table("gias-a1-rgap", "gias/rgap.yaml", data="faces"),
    *(chain(depth) for depth in (2, 4, 6, 10)),
    Script("gias-a3-joint", ("joint", "--data", "{path}"), "faces"),
    Table("giml-6-beta", "gias/giml_beta.yaml", against="z wrong domain", data="domains"),
    Script("gias-a4-speed", ("convergence", "{root}/giml-6-beta"), after=("giml-6-beta",)),
]


def share(jobs: int) -> dict[str, str]:
    """The environment of one of so many processes at a time; what is set already stays."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}


def run_fedsim(*words: str, jobs: int = 1) -> None:
    """One command of fedsim in a process of its own, with its share of the processor."""
    command = [sys.executable, "-m", "fedsim.cli", *words]
    subprocess.run(command, check=True, cwd=HERE.parent, env=os.environ | share(jobs))


def make_folder(folder: Path, *words: str) -> None:
    """What a script writes into ``-o``, all of it or nothing; what is there stays as it is."""
    if folder.is_dir():
        return
    half = folder.with_name(f"{folder.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    command = [sys.executable, *words, "-o", str(half)]
    subprocess.run(command, check=True, cwd=HERE.parent)
    half.rename(folder)


def prepare(source: Source, paths: Paths, root: Path) -> list[str]:
    """What a data set needs before its tables, made once; the overrides that name it."""
    if source == "any":
        return []
    if source == "cifar10":
        return [f"data.path={paths.cifar10}"]
    if source in ("largest", "random"):
        trees = root / "vulnerable"
        picking = ("pick", "--path", str(paths.cifar10), "--each", "8")
        make_folder(trees, "-m", "experiments.vulnerable", *picking)
        return [f"data.path={trees / source}"]
    faces = root / "faces"
    make_folder(faces, str(HERE / "data" / "olivetti.py"), str(paths.faces))
    if source == "faces":
        learned, name, shown = root / "faces.safetensors", "imagefolder", faces / "train"
    else:
        learned, name, shown = root / "cifar.safetensors", "cifar10", paths.needed("cifar10")
    if not learned.is_file():
        where = ("--data", name, "--path", str(shown), "-o", str(learned))
        run_fedsim("generator", "train", *where, *GENERATOR)
    return [f"data.path={faces / 'victims'}", f"threat.generator.checkpoint={learned}"]


@dataclass(frozen=True)
class Paths:
    """Where the data is that the tables are made of."""

    cifar10: Path | None
    faces: Path | None

    def needed(self, option: Literal["cifar10", "faces"]) -> Path:
        path: Path | None = getattr(self, option)
        if path is None or not path.exists():
            raise SystemExit(f"these tables need --{option} PATH; choose others with --only")
        return path

    def check(self, source: Source) -> None:
        """End with a sentence where the data of some tables is not there."""
        if source in ("faces", "domains"):
            self.needed("faces")
        if source in ("cifar10", "largest", "random", "domains"):
            self.needed("cifar10")


# for a CPU, wherever they stand
TUNED = {"steps", "refine", "tv", "image", "patch", "group", "lr_z", "lr_w"}
WHOLE = 6500  # steps of GIAS in all, whatever it searches: 1,500 on z and 5,000 on w


def at_paper_budget(spec: Path) -> str:
    """An override that gives every attack of a spec its paper's budget; what sets the rows of a
    table apart, such as a term that is left out or a single seed, stays."""
    attacks, components = [], load_spec(spec).attacks
    seeds = {c.params["seeds"] for c in components if "seeds" in c.params}
    for component in components:
        params = component.params
        kept = {k: v for k, v in params.items() if k not in TUNED or v == 0}
        if component.title is None:
            kept = {k: v for k, v in kept.items() if k not in ("lr", "optimizer")}
        if component.title is None or len(seeds) == 1:  # else it is what sets rows apart
            kept.pop("seeds", None)
        chosen = create_attack(component.name, **params)
        if isinstance(chosen, PresetParameters):
            kept["preset"] = "paper"
        else:  # without a paper's numbers it keeps its own
            kept = params
        if isinstance(chosen, Gias) and "/" not in chosen.space:
            kept["steps"] = WHOLE
        title = {"title": component.title} if component.title else {}
        attacks.append({"name": component.name, **kept, **title})
    return f"attacks={json.dumps(attacks)}"


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
    keep_budget(root, "papers'" if asked.paper else "small")
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

"""The benchmark: attacks x defenses x strengths, what each costs in accuracy and what it buys.

A bench spec is an ordinary spec with a section ``bench``:

    bench:
      defenses:
        - {name: gaussian_noise, strengths: [{std: 0.01}, {std: 0.1}]}
      utility: {train: {rounds: 8, upload: delta, local_epochs: 1, batch_size: 8}}
      seeds: [0]

Every cell is an audit of its own under ``DIR/cells``, resumable like any other, so that one
federation's observations serve all attacks; accuracy comes from a second federation under the
same defense (``utility``), because what is attacked at its worst (one picture, first round) is
not what one trains with. An attack that can adapt to a defense runs both ways, and the stronger
of the two counts.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from attacks import ATTACKS
from defenses import create_defenses
from fedsim.auditing import audit, federate
from fedsim.core.defense import Defense
from fedsim.core.errors import SpecError
from fedsim.core.registry import resolve
from fedsim.core.spec import Component, Spec, load_spec, read_content
from fedsim.core.store import Run, write_atomically, write_json
from fedsim.planning import prepare
from fedsim.verdict import BASELINE, RECOVERED_DB

NAIVE = " naive"
UNDEFENDED = "none"


class Axis(BaseModel):
    """One defense (or several together) at its strengths, mild first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    strengths: list[dict[str, Any]] = [{}]
    with_: list[dict[str, Any]] = Field(default=[], alias="with")  # defenses that act before it


class BenchSection(BaseModel):
    """What is benchmarked beside the spec itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    defenses: list[Axis]
    utility: dict[str, Any] = {}  # sections of the spec that differ where accuracy is measured
    seeds: list[int] = [0]
    target_accuracy: float | None = None  # rounds until it is reached are told


@dataclass(frozen=True)
class Cell:
    """One defense at one strength with one seed."""

    defense: str
    strength: str
    components: tuple[Component, ...]
    seed: int

    @property
    def label(self) -> str:
        return f"{self.defense} {self.strength}".strip()

    @property
    def folder(self) -> str:
        return re.sub(r"[^\w.=-]+", "-", f"{self.label}-seed-{self.seed}")


@dataclass(frozen=True)
class Bench:
    """A bench spec, checked."""

    spec: Spec
    section: BenchSection

    def cells(self) -> Iterator[Cell]:
        for seed in self.section.seeds:
            yield Cell(UNDEFENDED, "", (), seed)
            for axis in self.section.defenses:
                for strength in axis.strengths:
                    before = [Component.model_validate(c) for c in axis.with_]
                    own = Component.model_validate({**strength, "name": axis.name})
                    yield Cell(axis.name, _told(strength), (*before, own), seed)

    def attacked(self, cell: Cell) -> Spec:
        """The federation that is attacked."""
        defended = self.spec.model_copy(
            update={
                "defenses": list(cell.components),
                "seed": cell.seed,
                "name": cell.label,
                "attacks": list(both_ways(self.spec.attacks, cell.components)),
            }
        )
        return load_spec(defended.model_dump(mode="json", by_alias=True))

    def trained(self, cell: Cell) -> Spec:
        """The federation whose accuracy counts."""
        content = self.attacked(cell).model_dump(mode="json", by_alias=True)
        content["attacks"] = []
        content["audit"] = {}
        for section, changes in self.section.utility.items():
            content[section] = {**content[section], **changes}
        return load_spec(content)


def load_bench(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Bench:
    """Read a bench spec and check every cell of it."""
    content = read_content(source, overrides)
    if "bench" not in content:
        raise SpecError("a bench spec has a section 'bench' that lists defenses; this has none.")
    try:
        section = BenchSection.model_validate(content.pop("bench"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SpecError(f"bench.{where}: {first['msg']}.") from error
    bench = Bench(load_spec(content), section)
    if bench.spec.defenses:
        raise SpecError("a bench lists its defenses under bench.defenses, not under defenses.")
    for cell in bench.cells():
        create_defenses(list(cell.components))
        bench.trained(cell)
    return bench


def both_ways(attacks: Iterable[Component], components: Iterable[Component]) -> Iterator[Component]:
    """Attacks as they are, and once more as if they knew of no defense, where that can differ."""
    defenses = create_defenses(list(components))
    countered = any(type(defense).counter is not Defense.counter for defense in defenses)
    for attack in attacks:
        yield attack
        if countered and "adaptive" not in attack.params and _adapts(attack):
            told = attack.model_dump(mode="json", exclude_none=True)
            title = f"{attack.short_name}{NAIVE}"
            yield Component.model_validate({**told, "title": title, "adaptive": False})


def _adapts(attack: Component) -> bool:
    fields = dataclasses.fields(resolve("attack", ATTACKS, attack.name))
    return any(field.name == "adaptive" for field in fields)


def conduct(
    bench: Bench,
    root: str | Path,
    *,
    progress: Callable[[int, int, str], None] = lambda done, total, cell: None,
) -> pd.DataFrame:
    """`fedsim bench`: every cell that is missing, then table, frontier and report."""
    from fedsim.report.bench import write_bench_report

    root = Path(root)
    cells = list(bench.cells())
    for cell in cells:
        prepare(bench.attacked(cell))
    _claim(root, bench)
    rows: list[dict[str, Any]] = []
    for number, cell in enumerate(cells):
        progress(number, len(cells), cell.label)
        rows += measure(bench, cell, root)
    progress(len(cells), len(cells), "done")
    table = aggregate(pd.DataFrame(rows))
    write_atomically(root / "cells.csv", pd.DataFrame(rows).to_csv(index=False).encode())
    write_atomically(root / "table.csv", table.to_csv(index=False).encode())
    write_atomically(root / "table.md", as_markdown(table).encode())
    write_bench_report(bench, root, table, as_markdown(table))
    return table


def measure(bench: Bench, cell: Cell, root: Path) -> list[dict[str, Any]]:
    """The rows of one cell: one an attack."""
    run = Run(root / "cells" / cell.folder)
    if not (run.root / "summary.json").is_file():
        audit(bench.attacked(cell), run.root)
    trained = run
    if bench.section.utility:
        trained = Run(root / "utility" / cell.folder)
        federate(bench.trained(cell), trained.root)
    utility = _utility(trained, bench.section.target_accuracy)
    rows = []
    for verdict in run.summary["verdicts"]:
        scores = run.scores[run.scores["attack"] == verdict["attack"]]
        rows.append(
            {
                "defense": cell.defense,
                "strength": cell.strength,
                "seed": cell.seed,
                "attack": verdict["attack"],
                "verdict": verdict["verdict"],
                **_leakage(scores),
                **utility,
            }
        )
    return rows


def _leakage(scores: pd.DataFrame) -> dict[str, Any]:
    if scores.empty:
        return {"pictures": 0}
    means = {
        name: float(scores[name].mean()) if scores[name].notna().any() else None
        for name in ("psnr", "ssim", "lpips", "fft2d", "identified")
    }
    return {
        "pictures": len(scores),
        **means,
        "psnr_worst": float(scores["psnr"].max()),
        "recovered": float((scores["psnr"] >= RECOVERED_DB).mean()),
        "labels": float((scores["label_true"] == scores["label_recovered"]).mean()),
        "attack_seconds": float(
            scores.groupby(["round", "client", "trial"])["seconds"].first().sum()
        ),
    }


def _utility(run: Run, target: float | None) -> dict[str, Any]:
    rounds = run.rounds
    accuracy = rounds["test_accuracy"]
    reached = (
        rounds.loc[accuracy >= target, "round"] if target is not None else pd.Series(dtype=int)
    )
    return {
        "accuracy": float(accuracy.iloc[-1]) if accuracy.notna().any() else None,
        "rounds_to_target": int(reached.iloc[0]) if len(reached) else None,
        "bytes_a_round": int(rounds["bytes"].mean()),
        "round_seconds": float(rounds["seconds"].median()),
    }


def aggregate(rows: pd.DataFrame) -> pd.DataFrame:
    """Over seeds: means, and for an attack that ran both ways the stronger of the two."""
    rows = rows[rows["attack"] != BASELINE].copy()
    rows["adaptive"] = ~rows["attack"].str.endswith(NAIVE)
    rows["attack"] = rows["attack"].str.removesuffix(NAIVE)
    keys = ["defense", "strength", "attack"]
    numbers = [c for c in rows.columns if c not in (*keys, "seed", "verdict", "adaptive")]
    mean = rows.groupby([*keys, "adaptive"], sort=False)[numbers].mean(numeric_only=True)
    mean = mean.reset_index()
    rank = mean.assign(psnr=mean["psnr"].fillna(-np.inf))  # an attack that declined comes last
    chosen = mean.loc[rank.groupby(keys, sort=False)["psnr"].idxmax()]
    naive = mean[~mean["adaptive"]].set_index(keys)["psnr"]
    adaptive = mean[mean["adaptive"]].set_index(keys)["psnr"]
    index = pd.MultiIndex.from_frame(chosen[keys])
    chosen = chosen.assign(
        psnr_naive=naive.reindex(index).to_numpy(), psnr_adaptive=adaptive.reindex(index).to_numpy()
    )
    return chosen.drop(columns="adaptive").reset_index(drop=True)


def by_cell(table: pd.DataFrame) -> list[dict[str, Any]]:
    """One entry a defense and strength: the strongest attack's leakage, the accuracy, and whether
    no other cell beats it in both."""
    keys = ["defense", "strength"]
    rank = table.assign(ssim=table["ssim"].fillna(-np.inf))
    strongest = table.loc[rank.groupby(keys, sort=False)["ssim"].idxmax()]
    columns = [*keys, "attack", "psnr", "ssim", "recovered", "accuracy", "bytes_a_round"]
    cells: list[dict[str, Any]] = [
        {str(k): v for k, v in row.items()} for row in strongest[columns].to_dict("records")
    ]
    front = pareto(
        np.array([c["accuracy"] for c in cells], dtype=float), np.array([c["ssim"] for c in cells])
    )
    for cell, best in zip(cells, front.tolist(), strict=True):
        cell["accuracy"] = None if pd.isna(cell["accuracy"]) else float(cell["accuracy"])
        cell["front"] = best
    return cells


def pareto(accuracy: np.ndarray, leakage: np.ndarray) -> np.ndarray:
    """Which cells no other beats in both: at least as accurate and leaking at most as much."""
    front = []
    for a, s in zip(accuracy, leakage, strict=True):
        better = (accuracy >= a) & (leakage <= s) & ((accuracy > a) | (leakage < s))
        front.append(not bool(better.any()))
    return np.array(front, dtype=bool)


def as_markdown(table: pd.DataFrame) -> str:
    """Defenses down, attacks across: PSNR of the stronger way, naive in brackets; accuracy."""
    attacks = list(dict.fromkeys(table["attack"]))
    head = [
        "defense",
        "strength",
        *[f"{a}, dB" for a in attacks],
        "recovered",
        "accuracy",
        "KB a round",
    ]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for (defense, strength), own in table.groupby(["defense", "strength"], sort=False):
        cells = own.set_index("attack")
        shown = [_cell(cells.loc[a]) if a in cells.index else "declined" for a in attacks]
        first = own.iloc[0]
        accuracy = "" if pd.isna(first["accuracy"]) else f"{100 * first['accuracy']:.0f} %"
        recovered = f"{100 * own['recovered'].max():.0f} %"
        size = f"{first['bytes_a_round'] / 1024:.0f}"
        words = [str(defense), str(strength), *shown, recovered, accuracy, size]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def _cell(row: pd.Series) -> str:
    if pd.isna(row["psnr"]):
        return "declined"
    if pd.isna(row["psnr_naive"]):
        return f"{row['psnr']:.1f}"
    adaptive = "–" if pd.isna(row["psnr_adaptive"]) else f"{row['psnr_adaptive']:.1f}"
    return f"{adaptive} ({row['psnr_naive']:.1f})"


def _told(strength: Mapping[str, Any]) -> str:
    """A strength in a word or two: its numbers."""
    parts = []
    for key, value in strength.items():
        if value is True:
            parts.append(key)
        elif isinstance(value, list):
            parts.append("+".join(map(str, value)))
        else:
            parts.append(f"{key} {value}")
    return " ".join(parts)


def _claim(root: Path, bench: Bench) -> None:
    """Another bench's directory is refused."""
    about = {
        "spec": bench.spec.model_dump(mode="json", exclude={"engine"}),
        "bench": bench.section.model_dump(mode="json", by_alias=True),
    }
    path = root / "bench.json"
    if path.is_file() and json.loads(path.read_text()) != json.loads(json.dumps(about)):
        raise SpecError(f"'{root}' already holds another bench; give another directory.")
    write_json(path, about)

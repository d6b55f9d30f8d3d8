"""Cells: what a bench spec asks for. It is an ordinary spec with a section ``bench``:

    bench:
      defenses:
        - {name: gaussian_noise, strengths: [{std: 0.01}, {std: 0.1}]}
        - {name: batch size, levers: [train.batch_size=2, train.batch_size=8]}
      utility: {train: {rounds: 8, upload: delta, local_epochs: 1, batch_size: 8}}
      seeds: [0, 1]

Every cell is an audit of its own, so that one federation's observations serve all attacks; its
accuracy comes from a second federation under the same defense (``utility``), because what is
attacked at its worst (one picture, first round) is not what anybody trains with. An attack that can
adapt to a defense runs both ways, and the stronger of the two counts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedsim.campaign.suites import both_ways
from fedsim.core.errors import SpecError
from fedsim.core.sections import STANDARD
from fedsim.core.spec import Component, Spec, load_spec, read_content
from fedsim.core.text import in_brief
from fedsim.defenses.applied import declared

UNDEFENDED = "none"
QUICK_VICTIMS = 2
LONGEST = 120  # characters of a folder's name before the seed


class Axis(BaseModel):
    """One defense (or several together) at its strengths, mild first; or a lever of the spec."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    strengths: list[dict[str, Any]] = [{}]
    with_: list[dict[str, Any]] = Field(default=[], alias="with")  # defenses that act before it
    # Overrides, as on the command line, one or several together; then ``name`` is only a name.
    levers: list[str | list[str]] = []


class BenchSection(BaseModel):
    """What is benchmarked beside the spec itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    defenses: list[Axis]
    utility: dict[str, Any] = {}  # sections of the spec that differ where accuracy is measured
    seeds: list[int] = [0]
    target_accuracy: float | None = None  # rounds until it is reached are counted


@dataclass(frozen=True)
class Cell:
    """One defense at one strength with one seed."""

    defense: str
    strength: str
    seed: int
    components: tuple[Component, ...] = ()
    levers: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.defense} {self.strength}".strip()

    @property
    def folder(self) -> str:
        """Its label as a file may be called; where another label could be called the same, with a
        hash of its own."""
        name = re.sub(r"[^\w.=-]+", "-", self.label)
        told_apart = re.fullmatch(r"[\w.=]+( [\w.=]+)*", self.label, re.ASCII)
        if not told_apart or len(name) > LONGEST:
            own = hashlib.sha256(self.label.encode(errors="surrogatepass")).hexdigest()[:8]
            name = f"{name[:LONGEST]}-{own}"
        return f"{name}-seed-{self.seed}"


@dataclass(frozen=True)
class _Setting:
    """One strength of an axis, in brief words and in full ones, which no other has."""

    defense: str
    brief: str
    full: str
    components: tuple[Component, ...] = ()
    levers: tuple[str, ...] = ()


def _settings(axis: Axis) -> Iterator[_Setting]:
    for lever in axis.levers:
        together = (lever,) if isinstance(lever, str) else tuple(lever)
        brief = " ".join(one.partition("=")[2] for one in together)
        yield _Setting(axis.name, brief, " ".join(together), levers=together)
    before = [Component.model_validate(c) for c in axis.with_]
    for strength in [] if axis.levers else axis.strengths:
        component = Component.model_validate({**strength, "name": axis.name})
        brief, full = (
            " ".join([words(strength), *_beside(axis.with_, words)]).strip()
            for words in (in_brief, _full)
        )
        yield _Setting(axis.name, brief, full, (*before, component))


def _beside(others: Iterable[Mapping[str, Any]], words: Callable[..., str]) -> Iterator[str]:
    """The defenses that act before the one an axis is of."""
    for other in others:
        rest = {key: value for key, value in other.items() if key != "name"}
        yield f"with {other['name']} {words(rest)}".strip()


@dataclass(frozen=True)
class Bench:
    """A bench spec, checked."""

    spec: Spec
    section: BenchSection

    def cells(self) -> Iterator[Cell]:
        """Seed by seed, so that an interrupted bench has whole tables first."""
        settings = [setting for axis in self.section.defenses for setting in _settings(axis)]
        times = Counter((setting.defense, setting.brief) for setting in settings)
        for seed in self.section.seeds:
            yield Cell(UNDEFENDED, "", seed)
            for setting in settings:
                alone = times[setting.defense, setting.brief] == 1
                strength = setting.brief if alone else setting.full
                yield Cell(setting.defense, strength, seed, setting.components, setting.levers)

    def attacked(self, cell: Cell) -> Spec:
        """The federation that is attacked."""
        return load_spec(self._content(cell), cell.levers)

    def trained(self, cell: Cell) -> Spec:
        """The federation whose accuracy counts."""
        content = {**self._content(cell), "attacks": [], "audit": {}}
        for section, changes in self.section.utility.items():
            content[section] = {**content[section], **changes}
        return load_spec(content, cell.levers)

    def _content(self, cell: Cell) -> dict[str, Any]:
        changes = {
            "defenses": list(cell.components),
            "seed": cell.seed,
            "name": cell.label,
            "attacks": list(both_ways(self.spec.attacks, cell.components)),
            # Cells are what runs side by side; each is done in one process.
            "engine": self.spec.engine.model_copy(update={"kind": "inline"}),
        }
        return self.spec.model_copy(update=changes).model_dump(mode="json", by_alias=True)


def load_bench(
    source: str | Path | Mapping[str, Any], overrides: Iterable[str] = (), *, quick: bool = False
) -> Bench:
    """Read a bench spec and check every cell of it. Without attacks of its own it takes the
    standard suite; ``quick``: one seed, and two victims of each cell."""
    content = {"attacks": STANDARD, **read_content(source, overrides)}
    if "bench" not in content:
        raise SpecError("a bench spec has a section 'bench' that lists defenses; this has none.")
    try:
        section = BenchSection.model_validate(content.pop("bench"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SpecError(f"bench.{where}: {first['msg']}.") from error
    if quick:
        section = section.model_copy(update={"seeds": section.seeds[:1]})
        audit = content.get("audit") or {}
        content["audit"] = {**audit, "victims": min(QUICK_VICTIMS, audit.get("victims") or 2)}
    bench = Bench(load_spec(content), section)
    if bench.spec.defenses:
        raise SpecError("a bench lists its defenses under bench.defenses, not under defenses.")
    for part, changes in section.utility.items():
        if not isinstance(getattr(bench.spec, part, None), BaseModel):
            raise SpecError(f"bench.utility: '{part}' is no section of a spec.")
        if not isinstance(changes, dict):
            raise SpecError(f"bench.utility.{part}: list what differs there, as in a spec.")
    cells = list(_cells(bench))
    _refuse_namesakes(cells)
    for cell in cells:
        declared(cell.components)
        bench.attacked(cell)
        bench.trained(cell)
    return bench


def _refuse_namesakes(cells: Iterable[Cell]) -> None:
    """Raise where two cells would share a line of the table or a folder."""
    met: dict[str, Cell] = {}
    for cell in cells:
        for name in (f"{cell.label} seed {cell.seed}", cell.folder):
            if met.setdefault(name, cell) is not cell:
                raise SpecError(
                    f"bench.defenses: two cells are called '{cell.label}' with seed {cell.seed}; "
                    f"list each strength and seed once, and give each lever a name of its own."
                )


def _cells(bench: Bench) -> Iterator[Cell]:
    """The cells of a bench that was not checked yet."""
    try:
        yield from bench.cells()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SpecError(f"bench.defenses: a defense's '{where}': {first['msg']}.") from error


def _full(strength: Mapping[str, Any]) -> str:
    """A strength in words that no other has."""
    return " ".join(f"{key}={json.dumps(value, default=str)}" for key, value in strength.items())

"""The papers' own budgets: what a spec's attacks become with `preset: paper`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fedsim.attacks import create_attack
from fedsim.attacks.dlg import Dlg
from fedsim.attacks.gias import Gias
from fedsim.attacks.matching import MatchingAttack, PresetParameters
from fedsim.core.spec import load_spec

BUDGET = "budget"  # the file that says whose budget a folder of tables has
SMALL, PAPERS = "small", "papers'"

# for a CPU, wherever they stand and the paper has a number of its own
TUNED = {"steps", "refine", "tv", "bn", "image", "patch", "group", "lr_z", "lr_w"}
WHOLE = 6500  # steps of GIAS in all, whatever it searches: 1,500 on z and 5,000 on w


def is_papers_own(root: Path) -> bool:
    """Whether a folder holds tables at the papers' own budgets."""
    file = root / BUDGET
    return file.is_file() and file.read_text().strip() == PAPERS


def at_paper_budget(spec: Path, overrides: Sequence[str] = ()) -> str:
    """An override that gives every attack of a spec, with these overrides, its paper's budget; what
    sets the rows of a table apart, such as a term that is left out or a single seed, stays. A
    search of which no paper tells the steps (TAG) takes as many as DLG, which it extends."""
    attacks, components = [], load_spec(spec, overrides).attacks
    seeds = {c.params["seeds"] for c in components if "seeds" in c.params}
    for component in components:
        params = component.params
        chosen = create_attack(component.name, **params)
        if isinstance(chosen, PresetParameters):
            published = create_attack(component.name, preset="paper")
            tuned = {k for k in TUNED & params.keys() if params[k] and getattr(published, k)}
            kept = {k: v for k, v in params.items() if k not in tuned} | {"preset": "paper"}
            if component.title is None:
                kept = {k: v for k, v in kept.items() if k not in ("lr", "optimizer")}
            if component.title is None or len(seeds) == 1 or params.get("seeds") != 1:
                kept.pop("seeds", None)  # else it is what sets rows apart
        else:  # without a paper's numbers it keeps its own, but for steps that would be fewer
            kept = dict(params)
            if isinstance(chosen, MatchingAttack) and "steps" in params:
                kept["steps"] = Dlg(preset="paper").steps
        if isinstance(chosen, Gias) and "/" not in chosen.space:
            kept["steps"] = WHOLE
        title = {"title": component.title} if component.title else {}
        attacks.append({"name": component.name, **kept, **title})
    return f"attacks={json.dumps(attacks)}"

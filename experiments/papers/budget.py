"""The papers' own budgets: what a spec's attacks become with `preset: paper`."""

from __future__ import annotations

import json
from pathlib import Path

from fedsim.attacks import create_attack
from fedsim.attacks.gias import Gias
from fedsim.attacks.matching import PresetParameters
from fedsim.core.spec import load_spec

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

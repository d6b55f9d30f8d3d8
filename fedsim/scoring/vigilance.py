"""Vigilance: what an active server did in a run, what it cost, and what the clients noticed.

Guards write what they found into their client's vault, so this is the auditor's knowledge, like the
scores: no server reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pandas as pd

from fedsim.core.errors import FedsimError
from fedsim.core.observation import chosen_in, was_sent_other
from fedsim.core.run import Run, observation_path
from fedsim.core.spec import Spec
from fedsim.core.vault import Vault
from fedsim.defenses.guards import COMPARING

REFUSED = "client_refused"  # the event of a client whose guards kept it from uploading

Address = tuple[int, int]  # round and client
_ENDLESS = 1e30  # a score that was divided by next to nothing


def refused_in(run: Run) -> set[Address]:
    """Who did not upload, by round and client: of them there is nothing to attack."""
    return {
        (int(event["round"]), int(event["client"]))
        for event in run.events()
        if event.get("kind") == REFUSED and {"round", "client"} <= event.keys()
    }


def server_account(run: Run, spec: Spec, rounds: pd.DataFrame) -> dict[str, Any] | None:
    """What the server's manoeuvre was, in how many rounds, and what it left of the model's
    accuracy; None for an honest server."""
    component = spec.server.manoeuvre
    if component is None:
        return None
    tampered = spec.tampered_rounds
    copies = [r for r in range(1, spec.train.rounds + 1) if spec.is_copy(r)]
    accuracy = rounds.set_index("round")["test_accuracy"] if "test_accuracy" in rounds else None
    known = [] if accuracy is None else list(accuracy.dropna().items())
    return {
        "manoeuvre": component.short_name,
        "aggregate": spec.server.aggregate,
        "rounds": spec.train.rounds,
        "tampered": tampered,
        "copies": copies,
        "asked": sorted(set(spec.server.clients or [])),
        "chosen": _choices(run, spec),
        "accuracy": {str(r): float(value) for r, value in known},
        "words": _words(spec, len(copies)),
    }


def _words(spec: Spec, copies: int) -> str:
    """What becomes of the model, in a sentence."""
    count, of = len(spec.tampered_rounds), spec.train.rounds
    spent = f"{count} of {of} rounds were tampered with"
    return {
        "discard": f"{spent}; their replies did not enter the model, which stood still in them.",
        "include": f"{spent}, and their replies entered the model.",
        "honest_copy": f"{spent} and {copies} were honest copies of those with the same clients: "
        f"the model learned in the copies alone, at the cost of {count} more rounds.",
    }[spec.server.aggregate]


def _choices(run: Run, spec: Spec) -> list[dict[str, Any]]:
    """What each client was sent, in the manoeuvre's words, where that is known."""
    found = []
    for round_ in spec.tampered_rounds:
        for client in spec.cohort(round_):
            path = observation_path(run.observations, round_, client).with_suffix(".json")
            chosen = chosen_in(path)
            if chosen is not None:
                found.append({"round": round_, "client": client, "words": chosen.words})
    return found


def noticed(run: Run, spec: Spec) -> dict[str, Any] | None:
    """What the guards of the clients found in every round; None where no client has any."""
    if not spec.guards:
        return None
    tampered, rows = set(spec.tampered_rounds), list[dict[str, Any]]()
    unknown = 0
    for round_ in range(1, spec.train.rounds + 1):
        for client in spec.cohort(round_):
            try:
                findings = Vault(run.vault).read(round_, client).findings
            except FedsimError:  # absent, or not gathered
                unknown += 1
                continue
            where = {"round": round_, "client": client}
            changed = round_ in tampered and _received_other(run, round_, client)
            rows += [
                # who compares notes finds out about a round, whatever it received itself
                {
                    **where,
                    "tampered": round_ in tampered if f["guard"] == COMPARING else changed,
                    **f,
                }
                for f in findings
            ]
    return {"rows": rows, "unknown": unknown, "guards": _by_guard(rows)}


def _received_other(run: Run, round_: int, client: int) -> bool:
    """Whether a client was sent other weights than the round's; where it kept its upload back, and
    nothing tells, it is taken to have been."""
    changed = was_sent_other(observation_path(run.observations, round_, client))
    return changed is not False


def _by_guard(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """How often each guard spoke up, of tampered and of honest weights."""
    seen, fired, scores = Counter[tuple[str, bool]](), Counter[tuple[str, bool]](), dict[Any, Any]()
    for row in rows:
        key = str(row["guard"]), bool(row["tampered"])
        seen[key] += 1
        fired[key] += bool(row["fired"])
        scores[key] = max(scores.get(key, float("-inf")), float(row["score"]))
    return [
        {
            "guard": guard,
            "noticed": fired[guard, True],
            "tampered": seen[guard, True],
            "false_alarms": fired[guard, False],
            "honest": seen[guard, False],
            "highest": scores.get((guard, True)),
            "highest_honest": scores.get((guard, False)),
        }
        for guard in dict.fromkeys(name for name, _ in seen)
    ]


def words_at(noticed_: dict[str, Any] | None, round_: int, client: int) -> str | None:
    """What one client would have noticed in one round, for the caption of a picture; None where it
    has no guards."""
    if noticed_ is None:
        return None
    own = [r for r in noticed_["rows"] if (r["round"], r["client"]) == (round_, client)]
    if not own:
        return "what its guards found is not known"
    spoke = [
        f"{r['guard']} {_shown(r['score'])} (limit {_shown(r['limit'])})" for r in own if r["fired"]
    ]
    return f"noticed: {', '.join(spoke)}" if spoke else "its guards noticed nothing"


def _shown(value: float) -> str:
    return f"{value:.3g}" if value < _ENDLESS else "without bound"

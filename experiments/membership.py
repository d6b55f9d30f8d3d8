"""Who was in the batch: how well an update tells, and what of that is a mere reading of labels.

    python -m experiments.membership --cifar10 PATH --own PATH [--victims 8] [--only NAME ...]

One update of 16 pictures from an untrained ViT for each victim, in each case with something else
about it. Printed are the areas under the ROC curve with their 95 % intervals: beside others that
have exactly the batch's labels, beside others with any, and what the labels alone give beside
those; with --control also the first of these where every list is judged by another client's update.
--cifar10 is what docs/data.md says, --own a tree or zip of pictures that are not the clients'.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.audit.stages import audit
from fedsim.campaign.candidates import ANY, MATCHED, MEMBER
from fedsim.campaign.granted_truth import listed_for, secrets_of
from fedsim.campaign.jobs import Handout, Job, perform
from fedsim.campaign.plan import jobs_of, load_surrogate, victims
from fedsim.core.candidates import SCORES
from fedsim.core.run import Run
from fedsim.core.spec import Component, Spec, load_spec
from fedsim.scoring.membership import described

DELTA = "train.upload=delta"
CASES: dict[str, list[str]] = {
    "one gradient": [],
    "weighed against 8 others": ["attacks=[{name: membership, others: 8}]"],
    "no pictures of its own": ["threat.surrogate=null"],
    "four local steps of 4": [DELTA, "train.local_steps=4", "train.batch_size=4", "train.lr=0.01"],
    "embeddings and head": ["train.trainable=[patch_embed, pos_embed, head]"],
    "top 10 %": ["defenses=[{name: top_k, sparsity: 0.9}]"],
    "noise 0.001": ["defenses=[{name: gaussian_noise, std: 0.001}]"],
}


def spec_of(case: str, asked: argparse.Namespace) -> Spec:
    data = {"name": "cifar10", "path": str(asked.cifar10), "clients": 64, "image_size": 32}
    own = {"name": "imagefolder", "path": str(asked.own)}
    threat = {"model": "D", "surrogate": own, "candidates": 16}
    base = [
        "name=membership",
        f"data={json.dumps(data)}",
        "model={name: vit_tiny_patch16_224, options: {patch_size: 4}}",
        "train={batch_size: 16, lr: 0.05, rounds: 1, evaluate: false}",
        f"train.clients_per_round={max(asked.victims, 9)}",
        f"audit.victims={asked.victims}",
        f"threat={json.dumps(threat)}",
        "attacks=[{name: membership}]",
        "audit.gallery=0",
        "engine={kind: inline, device: auto}",
    ]
    return load_spec({}, [*base, *CASES[case], *asked.set])


def crossed(run: Run) -> pd.DataFrame:
    """What the attack says of every list when it is shown the update of another client, and no
    further ones: one of those would be the list's own."""
    spec, rows = run.spec, []
    jobs = [job for job in jobs_of(run, spec, victims(spec)) if not job.attack.is_baseline]
    handout = Handout(spec.threat, spec.seed, spec.engine.device, load_surrogate(spec))
    secrets = secrets_of(spec, run)
    for job, other in zip(jobs, [*jobs[1:], jobs[0]], strict=True):
        there = listed_for(run, other)
        result = perform(_alone(job), handout, secrets(other))
        assert result.membership is not None
        for at, said in enumerate(result.membership.tolist()):
            about: dict[str, Any] = {"round": other.round, "client": other.client, "trial": 0}
            about |= {"candidate": at, "stratum": there.strata[at], "digest": there.digests[at]}
            about["member"] = int(there.strata[at] == MEMBER)
            rows.append({**about, **dict(zip(SCORES, said, strict=False))})
    return pd.DataFrame(rows)


def _alone(job: Job) -> Job:
    params = {**job.attack.params, "others": 0}
    return replace(job, attack=Component(name=job.attack.name, **params))


def cell(area: dict[str, Any] | None) -> str:
    return "-" if area is None else f"{area['auc']:.3f} [{area['low']:.3f}, {area['high']:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cifar10", type=Path, required=True)
    parser.add_argument("--own", type=Path, required=True, help="pictures of the attacker's own")
    parser.add_argument("--victims", type=int, default=8)
    parser.add_argument("--control", action="store_true", help="judge by others' updates, too")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of every spec")
    asked = parser.parse_args()
    print("| case | same labels | any labels | labels alone | another's update |")
    print(f"|{'---|' * 5}")
    for name in asked.only:
        with tempfile.TemporaryDirectory() as folder:
            run = audit(spec_of(name, asked), Path(folder) / "run")
            entry = next(v for v in run.summary["verdicts"] if v["attack"] == "membership")
            if "membership" not in entry:
                raise SystemExit(entry["words"])
            found = entry["membership"]
            control = described(crossed(run))[MATCHED] if asked.control else None
        alone = found["label_only"][ANY]
        cells = [cell(one) for one in (found[MATCHED], found[ANY], alone, control)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

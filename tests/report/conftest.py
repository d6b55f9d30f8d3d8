"""Runs whose pictures, failures and canaries are made to order, and their pages."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from fedsim.audit.stages import conclude
from fedsim.campaign.plan import jobs_of, victims
from fedsim.core.attack import BASELINE, Reconstruction
from fedsim.core.files import write_json
from fedsim.core.run import Run, observation_name
from fedsim.core.spec import load_spec
from fedsim.core.vault import Truth, Vault
from fedsim.scoring.canary import Kept, computed_from, keep_canaries

EXACT, CLOSE, BLIND, FAILS = 0.0, 0.1, 0.45, None


def make_run(
    root: Path,
    attacks: dict[str, float | None],
    *,
    batch: int = 1,
    clients: int = 2,
    canary: float = 0.0,
    evaluate: bool = True,
    side: int = 16,
    photos: torch.Tensor | None = None,
    filmed: str = "",
    **spec: Any,
) -> Run:
    """A finished run: each attack returns the truth with that much noise on it, or fails."""
    content = {
        "attacks": [{"name": name} for name in attacks],
        "data": {"image_size": side, "clients": clients},
        "train": {"rounds": 2, "batch_size": batch},
        "audit": {"rounds": [2], "gallery": 0},  # noise is told from photographs by itself
        **spec,
    }
    run = Run.create(root, load_spec(content))
    coin = torch.Generator().manual_seed(0)
    vault = Vault(run.vault)
    chosen = victims(run.spec)
    for number, (round_, client) in enumerate(chosen):
        images = (
            torch.rand(batch, 3, side, side, generator=coin)
            if photos is None
            else photos[[(number * batch + i) % len(photos) for i in range(batch)]]
        )
        labels = torch.arange(batch) + client
        vault.write(round_, client, Truth(images, labels, [list(range(batch))], 0, []))
    keep_canaries(run, {observation_name(*at): _kept(run, at, canary) for at in chosen})
    for job in jobs_of(run, run.spec, chosen):
        noise = BLIND if job.label == BASELINE else attacks[job.label]
        if noise is None:
            about = {"job": job.name, "attack": job.label, "kind": "declined"}
            write_json(job.failure, {**about, "reason": "the update has no <patch> embedding."})
            continue
        truth = vault.read(job.round, job.client)
        guess = truth.images + noise * torch.randn(truth.images.shape, generator=coin)
        if noise == BLIND:
            guess = torch.rand(truth.images.shape, generator=coin)
        if job.label == BASELINE:
            guess = torch.full_like(guess, 0.5)
        Reconstruction(
            images=guess.clamp(0, 1),
            labels=None if job.label == BASELINE else truth.labels,
            loss=noise,
            trace=[(s, 1 / (s + 1) + noise) for s in range(50) if job.label != BASELINE],
            notes=[] if noise == EXACT else [f"{5 + job.client}e-3 of a step away"],
            ledger=["update", "weights"],
            seconds=1.5,
            film={1: guess[:1].clamp(0, 1), 9: truth.images[:1]} if filmed == job.label else {},
        ).save(job.result)
    rows = [
        {
            "round": r,
            "train_loss": 2.0 / r,
            "test_loss": 2.1 / r if evaluate else None,
            "test_accuracy": 0.3 * r if evaluate else None,
        }
        for r in (1, 2)
    ]
    run.write_table("rounds", pd.DataFrame(rows))
    conclude(run, seconds=12.0)
    return run


def _kept(run: Run, at: tuple[int, int], error: float) -> Kept:
    """A canary of an update that was never sent."""
    path = run.observations / f"{observation_name(*at)}.json"
    return Kept(error=error, of=computed_from(path, Vault(run.vault).read(*at), {}))


class Page(HTMLParser):
    """The tags of a report, and its text in order."""

    def __init__(self, run: Run):
        super().__init__()
        self.source = run.report.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.inside = "", ""
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_data(self, data: str) -> None:
        if self.inside != "style":
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="session")
def leaking(tmp_path_factory: pytest.TempPathFactory) -> Run:
    attacks = {"exact": EXACT, "blurry": CLOSE, "broken": FAILS}
    return make_run(tmp_path_factory.mktemp("report") / "run", attacks, batch=2)

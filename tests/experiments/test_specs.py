"""The specs that come with the project name things that exist, with parameters they take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.attacks import create_attack
from fedsim.audit.stages import audit
from fedsim.bench.cells import load_bench
from fedsim.campaign.plan import check_needs, labelled_attacks
from fedsim.core.metrics import psnr
from fedsim.core.run import Run
from fedsim.core.spec import load_spec, read_content
from fedsim.core.vault import Vault
from fedsim.defenses import create_defenses
from tests.staging import script

SPECS = sorted((Path(__file__).parents[2] / "experiments").rglob("*.yaml"))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_spec_of_ours_is_sound(path: Path) -> None:
    specs = [load_spec(path)] if "bench" not in read_content(path) else []
    if not specs:
        bench = load_bench(path)
        specs = [bench.attacked(cell) for cell in bench.cells()]
    for spec in specs:
        create_defenses(spec.defenses)
        labels = [label for label, _ in labelled_attacks(spec)]
        assert len(set(labels)) == len(labels)
        for _, component in labelled_attacks(spec):
            create_attack(component.name, **component.params)
            check_needs(component, spec)


def test_attacks_are_compared_batch_by_batch(small_run: Run) -> None:
    pair = ("--pair", "patch_solve", "prior_only")
    page = script("compare.py", small_run.root, "--tune", small_run.root, *pair)
    assert "| patch_solve | 160.0 [160.0, 160.0] | 160.0 |" in page
    assert "| mean picture |" in page
    scores = small_run.scores.groupby("attack")["psnr"].mean()
    apart = scores["patch_solve"] - scores["prior_only"]
    assert f"- patch_solve - prior_only: {apart:.1f} [" in page


def test_a_table_has_the_mean_picture_where_it_is_asked_for(small_run: Run) -> None:
    page = script("table.py", small_run.root, "--mean-picture", "--against", "prior_only")
    (line,) = [line for line in page.splitlines() if line.startswith("| mean picture |")]
    apart = float(line.split("|")[2].split()[0])
    truths = [Vault(small_run.vault).read(*place).images for place in _places(small_run)]
    mean = torch.cat(truths).mean(0)
    own = np.mean([float(psnr(t, mean.expand_as(t)).mean()) for t in truths])
    scores = small_run.scores[small_run.scores["attack"] == "prior_only"]
    guess = scores.groupby(["round", "client"])["psnr"].mean().mean()
    assert apart == pytest.approx(own - guess, abs=0.06)


def _places(run: Run) -> list[tuple[int, int]]:
    rows = run.scores[["round", "client"]].drop_duplicates()
    return [(int(round_), int(client)) for round_, client in rows.to_numpy()]


def test_the_curve_of_giml_comes_from_its_titles(tmp_path: Path) -> None:
    giml = "name: giml, meta_steps: 1, task_steps: 1, shared_steps: 1, steps: 2, seeds: 1"
    tiny = "options: {width: 4, latent_size: 4}"
    attacks = ", ".join(f"{{{giml}, {tiny}, title: giml {n}, after: {n}}}" for n in (0, 2))
    run = audit(
        load_spec(
            {},
            [
                "data={image_size: 16, clients: 2}",
                "model={name: convnet, options: {channels: [4]}}",
                "train={rounds: 2, batch_size: 2, evaluate: false}",
                f"attacks=[{attacks}]",
                "audit={rounds: [2]}",
                "engine={kind: inline, device: cpu}",
            ],
        ),
        tmp_path / "run",
    )
    page = script("giml_curve.py", run.root, "-o", tmp_path / "curve.png")
    assert "| giml, 0 meta-steps |" in page
    assert "| giml, 2 meta-steps |" in page
    assert (tmp_path / "curve.png").stat().st_size > 1000

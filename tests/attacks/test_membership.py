"""Membership, end to end on small runs: members are told from others of their own labels, and from
nobody where the update is another one's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from fedsim.attacks.membership import Membership
from fedsim.audit.stages import audit
from fedsim.campaign.granted_truth import secrets_of
from fedsim.campaign.jobs import Handout, Job, perform
from fedsim.campaign.plan import jobs_of, victims
from fedsim.core.candidates import Candidates
from fedsim.core.errors import AttackError, NotGranted
from fedsim.core.knowledge import Secrets, Traffic
from fedsim.core.run import Run
from fedsim.core.spec import Component
from fedsim.scoring.membership import table_of
from tests.conftest import small_spec
from tests.staging import short_report

OWN = {"references": 24, "own": 4, "others": 0}
ATTACK = "attacks=[{name: membership, references: 24, own: 4, others: 0}]"
BATCH = ["train.batch_size=4", "train.rounds=1", "threat={model: C, candidates: 8}"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fedsim.report.write_report", short_report)
        return audit(small_spec(*BATCH, ATTACK), tmp_path_factory.mktemp("members") / "run")


def jobs(run: Run) -> list[Job]:
    return [job for job in jobs_of(run, run.spec, victims(run.spec)) if job.label == "membership"]


def done(run: Run, job: Job, secrets: Secrets, **params: object) -> torch.Tensor:
    job = replace(job, attack=Component(name="membership", **{**OWN, **params}))
    result = perform(job, Handout(run.spec.threat, run.spec.seed, "cpu"), secrets)
    assert result.membership is not None
    return result.membership


def test_members_are_told_from_others_with_their_labels(run: Run) -> None:
    entry = next(v for v in run.summary["verdicts"] if v["attack"] == "membership")
    found = entry["membership"]
    assert found["matched"]["auc"] > 0.75
    assert found["label_only"]["matched"]["auc"] == 0.5
    assert (found["victims"], found["matched"]["members"]) == (2, 8)
    assert entry["canary"]["ok"]
    assert not entry["claims"]
    assert "claims no picture" in entry["words"]
    assert {"candidates", "update"} <= set(entry["ledger"])
    table = table_of(run)
    assert len(table) == 2 * 3 * 4
    assert table["member"].sum() == 8


def test_a_candidate_is_judged_for_itself(run: Run) -> None:
    job = jobs(run)[0]
    listed = secrets_of(run.spec, run)(job).candidates
    assert listed is not None
    whole = done(run, job, Secrets(candidates=listed))
    rows = [5, 0, 7]
    some = Candidates(listed.images[rows], listed.labels[rows])
    assert torch.allclose(done(run, job, Secrets(candidates=some)), whole[rows], rtol=1e-4)


def test_the_update_of_another_tells_nothing(run: Run) -> None:
    first, second = jobs(run)
    secrets = secrets_of(run.spec, run)
    own = done(run, first, secrets(first))[:, 0]
    crossed = done(run, first, secrets(second))[:, 0]
    assert own.max() > crossed.max()


def test_updates_of_others_are_weighed_against(run: Run) -> None:
    job = jobs(run)[0]
    secrets = secrets_of(run.spec, run)(job)
    alone, beside = done(run, job, secrets), done(run, job, secrets, others=1)
    assert not torch.allclose(alone, beside)
    assert "traffic" in Membership(others=1).uses
    assert "traffic" not in Membership(others=0).uses


def test_neither_the_clients_other_updates_nor_the_sum_it_is_in_are_others() -> None:
    def seen(round_: int, client: int, update: float) -> SimpleNamespace:
        tensors = {"w": torch.tensor([update])}
        weights = {"w": torch.tensor([float(round_)])}
        update_ = SimpleNamespace(tensors=tensors)
        return SimpleNamespace(round=round_, client=client, weights=weights, update=update_)

    views = [seen(1, 0, 1.0), seen(1, 1, 2.0), seen(2, 0, 3.0), seen(2, 1, 4.0), seen(2, 2, 3.0)]
    known = {(view.round, view.client): view for view in views}
    traffic = Traffic(tuple(known), lambda round_, client: known[round_, client])
    own = known[2, 0]
    own.traffic, own.grants = traffic, lambda name: name == "traffic"
    chosen = list(Membership(others=8)._rounds(own))
    assert [[(v.round, v.client) for v in views] for views in chosen] == [
        [(2, 0), (2, 1)],
        [(1, 1)],
    ]
    assert [len(views) for views in Membership(others=1)._rounds(own)] == [2]
    assert [len(views) for views in Membership(others=0)._rounds(own)] == [1]


def test_without_a_list_there_is_nothing_to_say(run: Run, tmp_path: Path) -> None:
    with pytest.raises(NotGranted, match=r"threat\.candidates=16 does"):
        audit(small_spec(ATTACK), tmp_path / "run")
    job = replace(jobs(run)[0], attack=Component(name="membership", **OWN))
    with pytest.raises(NotGranted, match="candidates"):
        perform(job, Handout(run.spec.threat, run.spec.seed, "cpu"), Secrets())


def test_other_attacks_of_the_same_run_are_handed_none(run: Run) -> None:
    secrets = secrets_of(run.spec, run)
    other = replace(jobs(run)[0], attack=Component(name=f"{__name__}:Copier"))
    assert secrets(other).candidates is None
    with pytest.raises(NotGranted, match="candidates"):
        perform(other, Handout(run.spec.threat, run.spec.seed, "cpu"), secrets(other))


@dataclass(frozen=True)
class Copier:
    """Hands the candidates back as what it reconstructed."""

    needs: ClassVar[frozenset[str]] = frozenset({"update"})

    def reconstruct(self, view, *, device, progress):
        from fedsim.core.attack import Reconstruction

        shown = view.candidates
        told = torch.zeros(len(shown), 1)
        return Reconstruction(shown.images[: view.batch_size], membership=told)


@dataclass(frozen=True)
class Asker(Copier):
    """The same, but it says that it needs them."""

    needs: ClassVar[frozenset[str]] = frozenset({"update", "batch_size", "candidates"})


def test_whoever_is_handed_candidates_may_not_hand_them_back(run: Run) -> None:
    secrets = secrets_of(run.spec, run)
    job = replace(jobs(run)[0], attack=Component(name=f"{__name__}:Asker"))
    assert secrets(job).candidates is not None
    with pytest.raises(AttackError, match="returned images, and was handed candidates"):
        perform(job, Handout(run.spec.threat, run.spec.seed, "cpu"), secrets(job))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["train={upload: delta, local_steps: 2, batch_size: 4, lr: 0.01}"],
        ["train={upload: delta, local_epochs: 2, batch_size: 8, lr: 0.01}", "data.clients=16"],
        ["train.trainable=[patch_embed, pos_embed]"],
        ["defenses=[{name: top_k, sparsity: 0.9}]"],
        ["defenses=[{name: gaussian_noise, std: 0.0001}]"],
        ["model={name: resnet18, options: {}}"],
    ],
    ids=["steps", "epochs", "partial", "top_k", "noise", "batchnorm"],
)
def test_it_works_on_whatever_is_uploaded(more: list[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("fedsim.report.write_report", short_report)
    found = audit(small_spec(*BATCH, ATTACK, *more), tmp_path / "run")
    entry = next(v for v in found.summary["verdicts"] if v["attack"] == "membership")
    assert entry["membership"]["matched"]["auc"] > 0.5
    assert entry["canary"]["ok"]

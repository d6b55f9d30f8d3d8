"""The active server: weights per client, kept, replayed, remembered."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from fedsim.audit.stages import audit, federate
from fedsim.core.errors import RunError, SpecError
from fedsim.core.observation import chosen_in, read_observation
from fedsim.core.run import Run, list_observations, weights_path
from fedsim.core.spec import Spec
from fedsim.federation.checkpoint import read_checkpoint
from tests.conftest import small_spec


def active(name: str = "OwnHead", *more: str, letter: str = "F", **params: Any) -> Spec:
    about = ", ".join(f"{key}: {value}" for key, value in params.items())
    component = f"{{name: 'tests.servers:{name}'{', ' + about if about else ''}}}"
    return small_spec(f"threat={letter}", f"server.manoeuvre={component}", *more)


@pytest.fixture(scope="module")
def tampered(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An audit whose clients each got a head of their own."""
    return audit(active(), tmp_path_factory.mktemp("active") / "run")


def test_an_observation_holds_what_its_client_received(tampered: Run) -> None:
    paths = list_observations(tampered.observations)
    honest = [read_observation(path) for path in paths]
    heads = [seen.weights["head.weight"] for seen in honest]
    assert len({float(head.sum()) for head in heads}) == len(heads)
    assert len({float(seen.weights["patch_embed.proj.weight"].sum()) for seen in honest}) == 1
    assert [seen.chosen.about["client"] for seen in honest] == [seen.client for seen in honest]


def test_a_tampered_head_does_not_store_the_backbone_again(tampered: Run) -> None:
    folder = weights_path(tampered.observations, 1).parent
    sizes = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
    sent = [size for name, size in sizes.items() if name.startswith("sent")]
    assert len(sent) == 2
    assert max(sent) < 0.05 * sizes["weights.safetensors"]


def test_the_canary_replays_with_the_weights_that_were_sent(tampered: Run) -> None:
    assert float(tampered.scores["canary"].max()) < 1e-6


def test_an_isolated_picture_is_a_batch_of_one(tmp_path: Path) -> None:
    run = audit(active("OwnHead", "train.batch_size=4"), tmp_path / "run")
    rows = run.scores[run.scores["attack"] == "patch_solve"]
    assert len(rows) == 4 * 4, "a row for every true picture"
    grey = rows[rows["label_recovered"].isna()]
    assert len(grey) == 3 * 4, "one is claimed of each batch"


def test_where_nothing_is_left_nothing_is_claimed(tmp_path: Path) -> None:
    spec = active("OwnHead", "train.batch_size=4", "train.clients_per_round=null", empty=[0, 1])
    run = audit(spec, tmp_path / "run")
    rows = run.scores[run.scores["attack"] == "patch_solve"]
    empty, others = rows[rows["client"] < 2], rows[rows["client"] >= 2]
    assert empty["label_recovered"].isna().all()
    assert others["label_recovered"].notna().sum() == len(others) / 4
    (entry,) = (e for e in run.summary["verdicts"] if e["attack"] == "patch_solve")
    assert entry["victims"] == entry["victims_of"] == 8


def test_memory_goes_on_after_a_kill(tampered: Run, tmp_path: Path) -> None:
    whole = read_checkpoint(tampered).memory
    assert [entry[0] for entry in whole["seen"]] == [1, 1, 2, 2]
    cut = Run(shutil.copytree(tampered.root, tmp_path / "run"))
    for path in weights_path(cut.observations, 2).parent.iterdir():
        path.write_bytes(b"damaged")
    again = audit(active(), cut.root)
    assert read_checkpoint(again).memory == whole
    columns = ["round", "client", "attack", "image", "psnr", "canary"]
    pd.testing.assert_frame_equal(again.scores[columns], tampered.scores[columns])
    assert chosen_in(list_observations(again.observations)[-1]).about["met"] == 2


@pytest.mark.parametrize("aggregate", ["discard", "include", "honest_copy"])
def test_what_becomes_of_the_replies(aggregate: str, tmp_path: Path) -> None:
    spec = active("OwnHead", f"server.aggregate={aggregate}")
    run = federate(spec, tmp_path / "run")
    first, second = (read_observation(p) for p in list_observations(run.observations)[::2])
    name = "patch_embed.proj.weight"
    before, after = (_sent(run, round_)[name] for round_ in (1, 2))
    final = read_checkpoint(run).arrays
    if aggregate == "discard":
        assert torch.equal(before, final[name])
        assert run.rounds["clients"].tolist() == [0, 0]
        assert run.rounds["failed"].tolist() == [0, 0]
    if aggregate == "include":
        assert not torch.equal(before, after)
        moved = (final["head.weight"] - _sent(run, 1)["head.weight"]).norm()
        assert float(moved) > 1, "the tampered heads are in the model"
    if aggregate == "honest_copy":
        assert torch.equal(before, after)
        assert (first.chosen is None, second.chosen is None) == (False, True)
        assert spec.cohort(1) == spec.cohort(2)
        assert run.rounds["clients"].tolist() == [0, 2]
        assert not torch.equal(after, final[name])


def _sent(run: Run, round_: int) -> dict[str, torch.Tensor]:
    from fedsim.core.observation import read_weights

    return read_weights(weights_path(run.observations, round_))


def test_alike_is_asked_once(tmp_path: Path) -> None:
    run = federate(active("SameHead", "train.rounds=1"), tmp_path / "run")
    folder = weights_path(run.observations, 1).parent
    assert len(list(folder.glob("sent-*.safetensors"))) == 1
    one, two = (read_observation(path) for path in list_observations(run.observations))
    assert torch.equal(one.weights["head.weight"], two.weights["head.weight"])


def test_the_server_asks_whom_it_chose_in_every_round(tmp_path: Path) -> None:
    spec = active("OwnHead", "server.clients=[3]", "train.rounds=4", letter="H")
    assert all(3 in spec.cohort(round_) for round_ in range(1, 5))
    assert all(len(spec.cohort(round_)) == 2 for round_ in range(1, 5))
    run = federate(spec, tmp_path / "run")
    assert all(chosen_in(path).asked == [3] for path in list_observations(run.observations))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("name", "changes 'nobody', which the model does not have"),
        ("shape", "changes 'head.weight', which the model does not have"),
        ("numbers", "numbers that are not finite"),
        ("memory", "keeps what is no plain value"),
        ("raises", "could not choose weights in round 1: KeyError"),
    ],
)
def test_a_manoeuvre_that_fails_ends_the_run_in_a_sentence(
    how: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=words):
        federate(active("Misshapen", how=how), tmp_path / "run")


def test_a_manoeuvre_without_victims_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no round that the server tampers with is audited"):
        audit(active("OwnHead", "server.rounds=[1]", "audit.rounds=[2]"), tmp_path / "run")


def test_an_observation_of_another_server_is_foreign(tampered: Run, tmp_path: Path) -> None:
    root = shutil.copytree(tampered.root, tmp_path / "run")
    from fedsim.core.errors import ForeignObservationError
    from fedsim.core.observation import refuse_foreign

    path = list_observations(Run(root).observations)[0]
    refuse_foreign(path, active())
    for other in (small_spec(), active(scale=2.0)):
        with pytest.raises(ForeignObservationError, match="its weights were chosen by"):
            refuse_foreign(path, other)

"""Candidates of an update: matched label by label, apart by their pixels, in no telling order."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.audit.stages import federate
from fedsim.campaign.candidates import ANY, MATCHED, MEMBER, Listed, listed
from fedsim.clients import draw_batches, images_of
from fedsim.clients.data import pixel_digest
from fedsim.core.errors import AttackError
from fedsim.core.run import Run
from fedsim.core.spec import Spec
from fedsim.core.vault import Truth, Vault
from tests.conftest import small_spec

BATCH = ["train.batch_size=8", "train.rounds=1", "threat={model: C, candidates: 16}"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return federate(small_spec(*BATCH), tmp_path_factory.mktemp("candidates") / "run")


def truth_of(run: Run, client: int) -> Truth:
    return Vault(run.vault).read(1, client)


def list_of(run: Run, client: int, spec: Spec | None = None) -> Listed:
    truth = truth_of(run, client)
    return listed(spec or run.spec, 1, truth, [truth])


def of(one: Listed, stratum: str) -> list[int]:
    return [row for row, name in enumerate(one.strata) if name == stratum]


def test_members_hide_among_as_many_of_their_labels_and_as_many_of_any(run: Run) -> None:
    client = run.spec.cohort(1)[0]
    there, truth = list_of(run, client), truth_of(run, client)
    assert Counter(there.strata) == {MEMBER: 8, MATCHED: 8, ANY: 8}
    labels = there.candidates.labels
    assert sorted(labels[of(there, MEMBER)].tolist()) == sorted(truth.labels.tolist())
    assert sorted(labels[of(there, MATCHED)].tolist()) == sorted(truth.labels.tolist())
    own = {pixel_digest(picture) for picture in truth.images}
    assert {there.digests[row] for row in of(there, MEMBER)} == own
    pictures = [pixel_digest(picture) for picture in there.candidates.images]
    assert pictures == list(there.digests)
    assert len(set(pictures)) == len(pictures)
    assert not own & {there.digests[row] for row in (*of(there, MATCHED), *of(there, ANY))}


def test_nobody_of_the_round_learned_from_the_others(run: Run) -> None:
    train = images_of(run.spec.data, "train")
    for client in run.spec.cohort(1):
        there = list_of(run, client)
        rows = {
            row
            for other in run.spec.cohort(1)
            for indices, _ in draw_batches(run.spec, 1, other)
            for row in indices
        }
        learned = {pixel_digest(train.image(row)) for row in rows}
        others = {there.digests[row] for row in (*of(there, MATCHED), *of(there, ANY))}
        assert not learned & others


def test_the_same_truth_has_the_same_list_and_another_one_another(run: Run) -> None:
    first, second = run.spec.cohort(1)
    assert list_of(run, first).digests == list_of(run, first).digests
    assert list_of(run, first).strata != list_of(run, second).strata


def test_a_list_may_be_shorter_than_the_batch(run: Run) -> None:
    spec = run.spec.model_copy(
        update={"threat": run.spec.threat.model_copy(update={"candidates": 3})}
    )
    assert Counter(list_of(run, run.spec.cohort(1)[0], spec).strata) == dict.fromkeys(
        (MEMBER, MATCHED, ANY), 3
    )


def test_the_place_on_the_list_tells_nothing(run: Run) -> None:
    truth = truth_of(run, run.spec.cohort(1)[0])
    places: list[float] = []
    for seed in range(60):
        other = Truth(truth.images, truth.labels, truth.batches, seed, [])
        there = listed(run.spec, 1, other, [other])
        places.append(float(np.mean(of(there, MEMBER))))
    assert abs(np.mean(places) - 11.5) < 4 * 2 / 60**0.5  # the mean of 8 of 24 places varies by 2


def test_a_picture_that_is_there_twice_is_no_other(run: Run) -> None:
    truth = truth_of(run, run.spec.cohort(1)[0])
    there = listed(run.spec, 1, truth, [truth])
    shown = there.candidates.images[of(there, MATCHED)]
    behind = Truth(shown, torch.zeros(len(shown), dtype=torch.long), [list(range(8))], 0, [])
    again = listed(run.spec, 1, truth, [truth, behind])
    assert not {pixel_digest(picture) for picture in shown} & set(again.digests)


def test_where_everybody_learned_from_all_it_has_the_test_split_follows(tmp_path: Path) -> None:
    everything = "train={upload: delta, batch_size: 16, local_epochs: 1, rounds: 1, lr: 0.01}"
    some = ["data.clients=2", "train.clients_per_round=2", "train.evaluate=false"]
    spec = small_spec(everything, *some, "threat={model: C, candidates: 4}")
    run = federate(spec, tmp_path / "run")
    there = list_of(run, 0)
    test = images_of(spec.data, "test")
    held_out = {pixel_digest(test.image(row)) for row in range(len(test.labels))}
    others = {there.digests[row] for row in (*of(there, MATCHED), *of(there, ANY))}
    assert len(others) == 8
    assert others <= held_out


def test_without_anybody_to_hide_among_there_is_no_list(run: Run) -> None:
    truth = truth_of(run, run.spec.cohort(1)[0])
    strange = Truth(truth.images, truth.labels + 100, truth.batches, 0, [])
    with pytest.raises(AttackError, match="nobody else's pictures are left"):
        listed(run.spec, 1, strange, [strange])


def test_a_captured_run_has_no_data_set_to_draw_from(run: Run) -> None:
    captured = run.spec.model_copy(update={"captured": object()})
    truth = truth_of(run, run.spec.cohort(1)[0])
    with pytest.raises(AttackError, match="a captured run names none"):
        listed(captured, 1, truth, [truth])

"""Seen: sums are read as larger batches by whoever knows of the masks, and by nobody else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedsim.audit.stages import audit, federate
from fedsim.campaign.seen import isolated_in, read_from, read_seen
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import THREATS
from fedsim.core.observation import read_observation
from fedsim.core.run import Run, list_observations
from tests.conftest import small_spec

MASKED = ["defenses=[{name: secure_aggregation}]", "train.clients_per_round=3", "train.rounds=1"]
PLAIN = MASKED[1:]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The same federation with its uploads in clear and masked."""
    root = tmp_path_factory.mktemp("sums")
    clear = federate(small_spec(*PLAIN, "train.batch_size=2"), root / "clear")
    return clear, federate(small_spec(*MASKED, "train.batch_size=2"), root / "masked")


def test_the_server_reads_the_mean_of_a_cohort_as_one_larger_batch(pair: tuple[Run, Run]) -> None:
    clear, masked = (list_observations(run.observations) for run in pair)
    updates = [read_observation(path).update for path in clear]
    for path in masked:
        seen = read_seen(path, THREATS["C"].grants)
        assert (seen.summed, seen.public.batch_size, seen.pictures) == (3, 6, 6)
        assert seen.update.num_examples == 6
        for name, tensor in seen.update.tensors.items():
            mean = sum(update.tensors[name] for update in updates) / 3
            assert torch.allclose(tensor, mean, atol=2**-22)


@pytest.mark.parametrize("letter", ["A", "B"])
def test_whoever_knows_nothing_of_the_masks_has_noise(letter: str, pair: tuple[Run, Run]) -> None:
    path = list_observations(pair[1].observations)[0]
    seen = read_seen(path, THREATS[letter].grants)
    assert (seen.summed, seen.public.batch_size) == (1, 2)
    assert all(tensor.dtype == torch.int64 for tensor in seen.update.tensors.values())
    assert read_from(path, THREATS[letter].grants) == [path]


def test_an_upload_in_clear_is_read_alone(pair: tuple[Run, Run]) -> None:
    path = list_observations(pair[0].observations)[0]
    assert read_from(path, THREATS["C"].grants) == [path]
    assert len(read_from(list_observations(pair[1].observations)[0], THREATS["C"].grants)) == 3


def test_who_dropped_out_is_not_in_the_sum(pair: tuple[Run, Run], tmp_path: Path) -> None:
    import shutil

    run = Run(shutil.copytree(pair[1].root, tmp_path / "run"))
    gone, *stayed = list_observations(run.observations)
    gone.unlink()
    clear = [read_observation(path).update for path in list_observations(pair[0].observations)[1:]]
    seen = read_seen(stayed[0], THREATS["C"].grants)
    assert seen.summed == 2
    for name, tensor in seen.update.tensors.items():
        mean = sum(update.tensors[name] for update in clear) / 2
        assert torch.allclose(tensor, mean, atol=2**-22)


def test_pictures_of_a_sum_are_scored_once_among_all_of_its_clients(tmp_path: Path) -> None:
    attack = "attacks=[{name: 'tests.pretenders:Flat', value: 0.4, looks: true}]"
    run = audit(small_spec(*MASKED, attack, "train.batch_size=2"), tmp_path / "run")
    rows = run.scores[run.scores["attack"] == "Flat"]
    assert len(rows) == 3 * 2
    assert rows["identified"].isna().all(), "whose picture is whose, the truth said"
    assert float(rows["canary"].max()) == 0.0


def test_a_manoeuvre_cannot_claim_more_pictures_than_there_are(
    pair: tuple[Run, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsim.core.manoeuvre import Isolated
    from fedsim.core.sent import Chosen
    from tests.servers import OwnHead

    path = list_observations(pair[0].observations)[0]
    chosen = Chosen(manoeuvre={"name": "tests.servers:OwnHead"})
    seen = replace(read_observation(path), chosen=chosen)
    assert isolated_in(seen, THREATS["C"].grants) is None
    found = isolated_in(seen, THREATS["F"].grants)
    assert found is not None
    assert found.pictures == 1
    monkeypatch.setattr(OwnHead, "isolate", lambda self, seen: Isolated(seen.update, 3))
    with pytest.raises(AttackError, match="3 pictures remain, and at most 2 stand behind"):
        isolated_in(seen, THREATS["F"].grants)

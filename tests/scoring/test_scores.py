"""Scores: reconstructions beside the truth, in its order, with labels where they belong."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from fedsim.audit.stages import audit
from fedsim.audit.tensorboard import Events
from fedsim.bench.table import aggregate
from fedsim.campaign.jobs import Job
from fedsim.campaign.plan import jobs_of, victims
from fedsim.campaign.progress import Silent
from fedsim.clients.data import pixel_digest
from fedsim.core.attack import BASELINE, Reconstruction
from fedsim.core.files import write_json
from fedsim.core.learning import Update
from fedsim.core.metrics import CEILING_DB, match_shifted, psnr
from fedsim.core.run import Run
from fedsim.core.spec import Component
from fedsim.core.vault import Truth, Vault
from fedsim.report import write_report
from fedsim.scoring.canary import relative_error
from fedsim.scoring.scores import (
    Yardstick,
    columns,
    failures,
    load_pictures,
    results_of,
    score_jobs,
)
from fedsim.scoring.verdict import summarise
from fedsim.viewer.app import create_app
from tests.conftest import small_spec
from tests.staging import photos
from tests.viewing import TOKEN, comparison, look


@pytest.fixture
def run(small_run: Run, tmp_path: Path) -> Run:
    return Run(shutil.copytree(small_run.root, tmp_path / "run"))


def jobs(run: Run) -> list[Job]:
    return jobs_of(run, run.spec, victims(run.spec))


def test_scores_of_a_run_are_those_in_its_table(run: Run) -> None:
    found = score_jobs(run, jobs(run))
    assert list(found.columns) == columns()
    kept = ["round", "client", "attack", "image", "psnr", "ssim", "label_true", "canary"]
    pd.testing.assert_frame_equal(found[kept], run.scores[kept], check_dtype=False)


def test_a_damaged_result_costs_its_own_rows_and_is_told(run: Run) -> None:
    before, damaged = score_jobs(run, jobs(run)), jobs(run)[0]
    damaged.result.write_bytes(b"nothing")
    after = score_jobs(run, jobs(run))
    assert len(after) == len(before) - 1
    assert len(list(results_of(jobs(run), run.spec.seed))) == len(jobs(run)) - 1
    (event,) = [event for event in run.events() if event["kind"] == "not_scored"]
    assert event["message"].startswith(f"{damaged.name} is not scored")


def test_a_picture_met_again_has_the_same_number(run: Run) -> None:
    images = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for round_, rows in ((7, [0, 1]), (8, [1, 2])):
        job = Job(run.observations, run.reconstructions, round_, 0, Component(name="x"), "x", 0)
        truth = Truth(images[rows], torch.tensor([0, 1]), [[0, 1]], 0, [])
        Vault(run.vault).write(round_, 0, truth)
        Reconstruction(images[rows]).save(job.result)
        found.append(job)
    assert score_jobs(run, found)["picture"].tolist() == [0, 1, 1, 2]


def made(run: Run, images: torch.Tensor, labels: list[int], found: Reconstruction) -> Job:
    """A job of these pictures, and what was found of them."""
    job = Job(run.observations, run.reconstructions, 9, 0, Component(name="x"), "x", 0)
    truth = Truth(images, torch.tensor(labels), [list(range(len(images)))], 0, [])
    Vault(run.vault).write(9, 0, truth)
    found.save(job.result)
    return job


def test_pictures_are_put_in_the_order_of_the_truth(run: Run) -> None:
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    job = made(run, images, [1, 2], Reconstruction(images.flip(0)))
    pictures = load_pictures(run, job)
    assert pictures is not None
    assert torch.equal(pictures.guess, images)


def test_a_picture_nobody_claims_is_grey(run: Run) -> None:
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    pictures = load_pictures(run, made(run, images, [1, 2], Reconstruction(images[1:])))
    assert pictures is not None
    assert torch.equal(pictures.guess[1], images[1])
    assert torch.equal(pictures.guess[0], torch.full((3, 8, 8), 0.5))


@pytest.mark.parametrize(
    ("true", "read", "told"),
    [
        ([1, 2], [2, 1], [1, 2]),  # a multiset: each gets its own where it is in there
        ([1, 1], [1, 3], [1, 3]),
        ([4, 5], [6, 7], [6, 7]),
        ([1, 2], None, [None, None]),
    ],
)
def test_labels_are_read_as_a_multiset(
    run: Run, true: list[int], read: list[int] | None, told: list[int | None]
) -> None:
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = None if read is None else torch.tensor(read)
    job = made(run, images, true, Reconstruction(images, labels=labels))
    rows = score_jobs(run, [job])
    assert rows["label_true"].tolist() == true
    assert [None if pd.isna(x) else int(x) for x in rows["label_recovered"]] == told


def test_an_exact_copy_and_its_negative_measure_as_they_should() -> None:
    truth = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    yardstick = Yardstick.of(truth, None)
    same, negative = yardstick.measure(truth), yardstick.measure(1 - truth)
    assert (same["mse"], same["psnr"], same["identified"]) == ([0.0], [160.0], [None])
    assert same["ssim"][0] == pytest.approx(1.0)
    assert negative["ssim"][0] < 0 < negative["mse"][0]


def test_the_distance_of_two_updates_is_relative_to_the_one_observed() -> None:
    observed = Update("gradient", {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])})
    near = Update("gradient", {"a": torch.tensor([3.0, 0.5]), "b": torch.tensor([4.0])})
    assert relative_error(observed, observed) == 0
    assert relative_error(near, observed) == pytest.approx(0.5 / 3)
    assert relative_error(Update("gradient", {"a": torch.ones(2)}), observed) == 1
    nothing = Update("gradient", {"a": torch.zeros(1)})
    assert relative_error(nothing, nothing) == 0


def test_a_tensor_counts_by_its_own_size_unless_it_is_but_rounding() -> None:
    observed = Update("gradient", {"large": torch.ones(100), "small": torch.full((1,), 0.1)})
    changed = {**observed.tensors, "small": torch.full((1,), 0.11)}
    assert relative_error(replace(observed, tensors=changed), observed) == pytest.approx(0.1)
    rounding = {**observed.tensors, "small": torch.full((1,), 1e-8)}
    nothing = {**observed.tensors, "small": torch.zeros(1)}
    one, other = (replace(observed, tensors=tensors) for tensors in (rounding, nothing))
    assert relative_error(one, other) == pytest.approx(1e-6, rel=1e-3)


def test_whatever_attacks_read_of_an_update_counts_in_the_distance() -> None:
    tensors = {"a": torch.tensor([3.0, 4.0])}
    buffers = {
        "n.running_mean": torch.tensor([1e-3, 0.0]),
        "n.running_var": torch.tensor([1e3, 1e3]),
        "n.num_batches_tracked": torch.tensor(100_000),
    }
    observed = Update("delta", tensors, buffers, num_examples=4)

    def apart(**other: torch.Tensor) -> float:
        changed = {f"n.{name}": tensor for name, tensor in other.items()}
        return relative_error(replace(observed, buffers=buffers | changed), observed)

    assert relative_error(observed, observed) == 0
    assert relative_error(replace(observed, num_examples=400), observed) == 1
    assert relative_error(replace(observed, kind="gradient"), observed) == 1
    assert relative_error(replace(observed, buffers={}), observed) == 1
    assert relative_error(replace(observed, tensors={"a": torch.ones(1)}), observed) == 1
    assert apart(running_mean=torch.tensor([2e-3, 0.0])) == pytest.approx(1.0)
    assert apart(running_var=torch.tensor([1e3, 1.1e3])) > 0.05
    assert apart(num_batches_tracked=torch.tensor(100_001)) == 1
    assert math.isnan(apart(running_mean=torch.tensor([float("nan"), 0.0])))


def test_a_result_of_another_observation_is_told_and_not_scored(run: Run) -> None:
    first, second = jobs(run)[:2]
    shutil.copy(first.result, second.result)
    scores = score_jobs(run, jobs(run))
    assert len(scores) == len(run.scores) - 1
    (event,) = [event for event in run.events() if event["kind"] == "not_scored"]
    assert "made from another update than the one observed" in event["message"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"observation": ""}, "made from another update than the one observed"),
        ({"made_by": ""}, "does not say which attack made it"),
        ({"made_by": "somebody"}, "made by another attack, with other parameters or in another"),
    ],
)
def test_a_result_that_does_not_name_what_it_was_made_from_is_not_scored(
    run: Run, names: dict[str, str], words: str
) -> None:
    job = jobs(run)[0]
    replace(Reconstruction.load(job.result), **names).save(job.result)
    assert len(score_jobs(run, jobs(run))) == len(run.scores) - 1
    assert len(list(results_of(jobs(run), run.spec.seed))) == len(jobs(run)) - 1
    assert words in run.events()[-1]["message"]


def test_a_result_of_a_version_that_named_nothing_is_taken_as_it_is(run: Run) -> None:
    for job in jobs(run):
        result = Reconstruction.load(job.result)
        replace(result, observation="", made_by="").save(job.result)
    assert len(score_jobs(run, jobs(run))) == len(run.scores)
    assert not run.events()


def test_a_result_in_the_folder_of_another_attack_is_told_and_not_scored(run: Run) -> None:
    own = [job for job in jobs(run) if job.label == "patch_solve"]
    for job in own:
        baseline = replace(job, label="prior_only")
        shutil.copy(baseline.result, job.result)
    scores = score_jobs(run, jobs(run))
    assert set(scores["attack"]) == {"prior_only"}
    assert len([event for event in run.events() if event["kind"] == "not_scored"]) == len(own)
    assert "made by another attack" in run.events()[-1]["message"]


def test_a_result_with_more_guesses_than_pictures_is_not_scored(run: Run) -> None:
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for many in (
        Reconstruction(torch.cat([images, images])),
        Reconstruction(images, labels=torch.arange(8)),
    ):
        assert score_jobs(run, [made(run, images, [1, 2], many)]).empty
        assert "at most 2 stand behind the update" in run.events()[-1]["message"]
    job = jobs(run)[0]  # of an observation that says how many there are: one
    found = Reconstruction.load(job.result)
    replace(found, images=found.images.repeat(3, 1, 1, 1)).save(job.result)
    assert score_jobs(run, [job]).empty
    assert "returned 3 pictures, and at most 1 stand" in run.events()[-1]["message"]


def test_failures_come_with_their_reasons_even_where_the_file_is_damaged(run: Run) -> None:
    first, second, third = jobs(run)[:3]
    for job in (first, second):
        job.result.unlink()
    told = {"job": first.name, "attack": first.label, "kind": "crashed", "reason": "no memory"}
    write_json(first.failure, told)
    second.failure.write_text("{")
    write_json(third.failure, told)  # it was tried again and is done
    found = failures([first, second, third])
    assert found[0] == told
    assert "which says why, is damaged" in found[1]["reason"]
    assert len(found) == 2


def test_the_flat_colour_is_the_best_of_all(run: Run) -> None:
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    images[1] = torch.tensor([0.2, 0.4, 0.6]).view(3, 1, 1)
    rows = score_jobs(run, [made(run, images, [1, 2], Reconstruction(images))])
    assert list(rows.columns)[-6:-2] == ["psnr_flat", "ssim_flat", "digest", "claimed"]
    assert list(rows.columns)[-2:] == ["features", "features_free"]
    assert rows["claimed"].all()
    assert rows["psnr_flat"][1] == pytest.approx(CEILING_DB, abs=20)  # flat itself, up to rounding
    level = images[0].mean((1, 2), keepdim=True)
    best = psnr(images[:1], level.expand(3, 8, 8)[None])
    assert rows["psnr_flat"][0] == pytest.approx(float(best), abs=1e-4)
    for other in (level + 0.02, level - 0.02, torch.full((3, 1, 1), 0.5)):
        assert float(psnr(images[:1], other.expand(3, 8, 8)[None])) < rows["psnr_flat"][0]


def test_no_more_guesses_are_scored_than_there_are_pictures_and_the_first_ones_are(
    run: Run,
) -> None:
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    grey = torch.full_like(images, 0.5)
    grey[1] = 0.6
    job = Job(run.observations, run.reconstructions, 9, 0, Component(name="x"), "x", 0)
    Vault(run.vault).write(9, 0, Truth(images, torch.tensor([1, 2]), [[0, 1], [1, 0]], 0, []))
    for guess, labels, best in (
        (torch.cat([grey, images]), [5, 6, 1, 2], 20.0),  # what is right comes too late
        (torch.cat([images, grey]), [1, 2, 5, 6], 160.0),
    ):
        Reconstruction(guess, labels=torch.tensor(labels)).save(job.result)
        rows = score_jobs(run, [job])
        assert len(rows) == 2
        assert rows["psnr"].max() <= best
        assert rows["label_recovered"].tolist() == labels[:2]
        pictures = load_pictures(run, job)
        assert pictures is not None
        assert len(pictures.result.images) == 2, "identification sees no more of them"
    (event,) = [event for event in run.events() if event["kind"] == "left_out"]
    assert (
        "2 pictures stand behind the update; 2 of 4 pictures and 2 of 4 labels"
        in (event["message"])
    )


def test_a_guess_made_twice_takes_no_place_of_another(run: Run) -> None:
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    job = Job(run.observations, run.reconstructions, 9, 0, Component(name="x"), "x", 0)
    Vault(run.vault).write(9, 0, Truth(images, torch.tensor([1, 2]), [[0, 1], [1, 0]], 0, []))
    for order in ([0, 0, 0, 1], [0, 0, 1]):
        Reconstruction(images[order], labels=torch.tensor(order) + 1).save(job.result)
        rows = score_jobs(run, [job])
        assert rows["psnr"].tolist() == [160.0, 160.0]
        assert rows["label_recovered"].tolist() == [1, 2]
    Reconstruction(images[[0, 0, 1]] * torch.tensor([1.0, 1, 0]).view(3, 1, 1, 1)).save(job.result)
    assert score_jobs(run, [job])["psnr"].max() == 160.0


def test_a_batch_that_came_back_shifted_is_registered_whatever_lies_beside_it(run: Run) -> None:
    images, _ = photos(32, range(0, 120, 15))
    labels = list(range(8))
    shifted = images.roll((16, 16), (2, 3))
    rows = score_jobs(run, [made(run, images, labels, Reconstruction(shifted))])
    assert (rows["psnr"] < 30).all()
    assert rows["psnr_registered"].tolist() == [160.0] * 8
    fewer = score_jobs(run, [made(run, images, labels, Reconstruction(shifted[2:5]))])
    assert (fewer["psnr_registered"] == 160).tolist() == [at in (2, 3, 4) for at in range(8)]


def test_another_order_lifts_no_registered_score_that_is_no_picture(run: Run) -> None:
    truth, _ = photos(32, range(0, 120, 15))
    others, _ = photos(32, range(7, 127, 15))
    alone = Yardstick.of(truth, None).measure(others)
    both = Yardstick.of(truth, None).measure(others, others[match_shifted(truth, others)])
    assert both == alone


def test_a_result_without_a_picture_is_not_scored(run: Run) -> None:
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert score_jobs(run, [made(run, images, [1, 2], Reconstruction(images[:0]))]).empty
    assert "it holds no picture" in run.events()[-1]["message"]


def test_a_client_that_takes_its_pictures_again_and_again_allows_no_more_guesses(
    tmp_path: Path,
) -> None:
    train = "{rounds: 1, clients_per_round: 1, upload: delta, local_steps: 200, lr: 1.0e-4}"
    spec = small_spec(
        *("data.clients=60", f"train={train}", "train.evaluate=false", "audit.gallery=0"),
        "model.options={patch_size: 16, depth: 1, embed_dim: 12, num_heads: 2}",
        "attacks=[{name: 'tests.pretenders:Many', count: 200}]",
    )
    found = audit(spec, tmp_path / "run")
    rows = found.scores.query("attack == 'Many'")
    assert len(rows) < 200
    assert rows["psnr"].nunique() > 1
    assert (rows["label_recovered"].astype(int) < 8).all()
    assert f"{200 - len(rows)} of 200 pictures" in str(found.summary["events"])
    kept = load_pictures(found, jobs(found)[0])
    assert kept is not None
    assert float(kept.result.images.max()) < 0.5, "its first ones, which are the dark ones"


def test_scores_from_before_there_were_flat_colours_open_everywhere(
    small_run: Run, tmp_path: Path
) -> None:
    shelf = tmp_path / "shelf"
    for name in ("one", "two"):
        old = Run(shutil.copytree(small_run.root, shelf / name))
        scores = old.scores.drop(columns=["psnr_flat", "ssim_flat", "digest"])
        old.write_table("scores", scores, parquet=True)
    write_report(old, jobs(old))
    Events(Silent(), old.root).conclude(old)
    viewer = create_app([shelf], TOKEN)
    page = look(viewer, comparison(viewer, "one", "two"))
    assert page.status_code == 200
    assert "psnr_flat" not in old.scores
    pictures = scores.assign(defense="none", strength="", seed=0)
    cost = dict.fromkeys(("accuracy", "rounds_to_target", "epsilon"))
    cost |= dict.fromkeys(("bytes_a_round", "upload_bytes", "round_seconds"), 1.0)
    cell = {"defense": "none", "strength": "", "seed": 0, "doubt": "", "verdict": "LEAKS"}
    counts = {"victims": 4, "victims_of": 4}
    outcomes = [
        {**cell, **cost, **counts, "attack": "patch_solve", "baseline": False},
        {**cell, **cost, **counts, "attack": "prior_only", "baseline": True},
    ]
    assert aggregate(pictures, pd.DataFrame(outcomes))["recovered"].tolist() == [1.0]


AUGMENTED = (
    "train={rounds: 1, clients_per_round: 2, evaluate: false, "
    "augment: [{name: RandomResizedCrop, scale: [0.3, 0.6]}]}"
)


def test_a_picture_is_scored_as_the_model_saw_it_and_as_it_was(tmp_path: Path) -> None:
    run = audit(small_spec(AUGMENTED, "audit.gallery=20"), tmp_path / "run")
    rows = run.scores[run.scores["attack"] == "patch_solve"]
    assert (rows["psnr"] > 60).all()
    assert (rows["psnr_original"] < 30).all()
    assert (rows["canary"] < 1e-4).all()
    (entry, _) = run.summary["verdicts"]
    assert entry["verdict"] == "LEAKS"
    assert (entry["originals"]["seen"], entry["originals"]["originals"]) == (2, 0)
    assert (entry["label_accuracy"], entry["labels"]["by_chance"]) == (1.0, pytest.approx(1 / 8))
    assert (
        "as the model saw them, augmented: 2 of 2 came back; of the originals 0" in (entry["words"])
    )
    again = [pixel_digest(one) for o in victims(run.spec) for one in original_of(run, *o)]
    assert rows["digest"].tolist() == again  # the same picture in another run is known again


def original_of(run: Run, round_: int, client: int) -> torch.Tensor:
    return Vault(run.vault).read(round_, client).sources


def test_where_nothing_is_augmented_both_scores_are_the_same(run: Run) -> None:
    found = score_jobs(run, jobs(run))
    assert found["psnr_original"].tolist() == found["psnr"].tolist()
    assert found["ssim_original"].tolist() == found["ssim"].tolist()


FLIPPED = (
    "train={rounds: 1, clients_per_round: 1, evaluate: false, "
    "augment: [{name: RandomHorizontalFlip, p: 1.0}]}"
)


def test_whoever_gives_back_the_picture_as_it_was_has_it_though_the_model_saw_its_mirror(
    tmp_path: Path,
) -> None:
    run = audit(small_spec(FLIPPED, "audit.gallery=0"), tmp_path / "run")
    ((round_, client),) = victims(run.spec)
    own = original_of(run, round_, client)
    (job,) = (job for job in jobs(run) if job.label == "patch_solve")
    replace(Reconstruction.load(job.result), images=own).save(job.result)
    scores = score_jobs(run, jobs(run))
    found = scores[scores["attack"] == "patch_solve"].iloc[0]
    assert found["psnr"] < 20
    assert found["psnr_original"] == pytest.approx(160)
    assert found["psnr_flat_original"] == pytest.approx(found["psnr_flat"], abs=1e-3)
    (entry, _) = summarise(scores, run.spec, ["patch_solve", BASELINE], {}, [])
    assert entry["verdict"] == "LEAKS"
    assert (entry["originals"]["seen"], entry["originals"]["originals"]) == (0, 1)

"""What a report says, and never says."""

from __future__ import annotations

import re
from pathlib import Path

from fedsim.audit.stages import conclude
from fedsim.campaign.plan import jobs_of, victims
from fedsim.core.files import write_json
from fedsim.core.run import Run
from fedsim.report import content
from tests.conftest import small_spec
from tests.report.conftest import BLIND, CLOSE, EXACT, Page, make_run


def test_an_attack_without_a_result_says_so_and_gives_its_reason(leaking: Run) -> None:
    page = Page(leaking)
    assert "broken gave no result: the update has no <patch> embedding." in page.text
    assert "This says nothing about safety." in page.text
    assert "broken on round-0002/client-0000, trial 0 and 1 more (declined)" in page.text


def test_notes_and_ledger_and_command_are_there(leaking: Run) -> None:
    text = re.sub(r"\s+", " ", Page(leaking).text)
    assert "5e-3 of a step away (2 of 2 jobs, each with its own numbers)" in text
    assert "exact: update, weights" in text
    assert "fedsim audit spec.yaml -o DIR" in text
    assert leaking.spec.digest() in text


def test_oracle_labels_are_announced_and_absent_otherwise(tmp_path: Path, leaking: Run) -> None:
    words_ = "Labels were given to the attacker by an oracle"
    threat = {"model": "C", "oracle_labels": True}
    text = Page(make_run(tmp_path / "run", {"exact": EXACT}, threat=threat)).text
    assert text.index(words_) < text.index("The attacker reconstructed")
    assert "the true labels of the private batch" in text
    assert words_ not in Page(leaking).text


def test_a_failed_canary_is_announced_and_nothing_is_concluded(tmp_path: Path) -> None:
    page = Page(make_run(tmp_path / "run", {"blurry": BLIND}, canary=0.3))
    assert "The canary failed for 2 of 2 attacked updates." in page.text
    assert "No conclusion: the attacks did not simulate what the clients did." in page.text
    assert "worst relative error 0.3" in page.text


def test_a_picture_that_came_back_is_told_whatever_the_canary_says(tmp_path: Path) -> None:
    text = Page(make_run(tmp_path / "run", {"exact": EXACT}, canary=0.3)).text
    assert "The attacker reconstructed all 2 attacked pictures." in text
    assert "The canary failed for 2 of 2 attacked updates." in text


def test_not_recovered_never_reads_as_safe(tmp_path: Path) -> None:
    text = Page(make_run(tmp_path / "run", {"blind": BLIND}, evaluate=False)).text
    assert "The attacks in this run did not recover a picture." in text
    assert "not about the clients' safety" in text
    assert "there is no accuracy" in text


def test_less_than_was_asked_for_is_no_conclusion(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"blind": BLIND}, clients=4)
    job = jobs_of(run, run.spec, victims(run.spec))[0]
    job.result.unlink()
    about = {"job": job.name, "attack": job.label, "kind": "crashed"}
    write_json(job.failure, {**about, "reason": "no memory"})
    conclude(run)
    page = Page(run)
    text = re.sub(r"\s+", " ", page.text)
    assert "No conclusion: less was attacked than was asked for." in text
    assert "By blind, 1 of 4 victims could not be scored." in text
    assert "did not recover a picture" not in text
    assert text.count("3 of 4 victims") == 2  # in its words and in the table
    assert ".incomplete { --tone: var(--incomplete); }" in page.source


def test_the_most_exposed_client_and_the_comparisons_are_told(tmp_path: Path) -> None:
    text = Page(make_run(tmp_path / "run", {"exact": EXACT, "close": CLOSE})).text
    assert "Who is exposed most" in text
    assert "Attack against attack" in text
    assert "Leakage over training" not in text  # one round says nothing about training


def test_a_promised_budget_is_in_the_report(tmp_path: Path) -> None:
    noisy = [{"name": "dp_sgd", "noise": 1.0}]
    text = Page(make_run(tmp_path / "run", {"close": CLOSE}, defenses=noisy)).text
    assert "dp_sgd promises one sample of a client epsilon" in text


def test_a_budget_without_noise_is_told_as_none_at_all() -> None:
    budget = {"defense": "dp_sgd", "epsilon": None, "delta": 1e-5, "protects": "one sample"}
    (told,) = content.privacy({"privacy": [budget]})
    assert "no epsilon at all" in told


def test_how_clients_train_is_a_fact_where_it_is_more_than_plain_steps() -> None:
    train = (
        "train={augment: [{name: RandAugment}, {name: MixUp}], loss: {label_smoothing: 0.1, "
        "weights: balanced}, accumulate: 2, strategy: FedProx, strategy_options: "
        "{proximal_mu: 0.5}, round_schedule: {name: cosine}, precision: bfloat16, "
        "upload_dtype: float16}"
    )
    ((name, words),) = content._training_facts(small_spec(train).train)
    assert name == "Training"
    assert words == (
        "pictures augmented (RandAugment, MixUp); labels smoothed by 0.1; classes weighted by each "
        "client's own counts; 2 batches a step; FedProx mu 0.5; learning rate by round: cosine; "
        "computed in bfloat16; uploaded in float16"
    )
    assert content._training_facts(small_spec().train) == []

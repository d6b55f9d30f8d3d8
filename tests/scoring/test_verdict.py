"""Verdicts: the rules, each on scores made for it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from torchvision.transforms.functional import to_pil_image

from fedsim.audit.stages import audit
from fedsim.clients import images_of
from fedsim.core.attack import BASELINE
from fedsim.core.spec import Component, DataSpec, Spec
from fedsim.report.headline import strongest
from fedsim.scoring.verdict import Asked, asked_of, summarise
from tests.conftest import small_spec
from tests.scoring.conftest import table


def verdict(scores: pd.DataFrame, failed: list[dict[str, str]] | None = None) -> dict:
    return summarise(scores, Spec(), ["mine", BASELINE], {}, failed or [])[0]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (table([35, 12, 12], [12, 12, 12]), "LEAKS"),
        (table([35, 12, 12], [33, 12, 12]), "NOT RECOVERED"),
        (table([29, 12, 12], [12, 12, 12]), "NOT RECOVERED"),
        (table([20, 19, 21], [12, 12, 12]), "PARTIAL"),
        (table([12, 12, 12], [12, 12, 12], ssim=0.4), "PARTIAL"),
        (table([12, 12, 12], [12, 12, 12]), "NOT RECOVERED"),
        (table([20, 19, 21], [12, 12, 12], canary=0.1), "MIS-SPECIFIED"),
        (table([12, 12, 12], [12, 12, 12], canary=float("nan")), "MIS-SPECIFIED"),
        (table([35, 12, 12], [12, 12, 12], canary=0.1), "LEAKS"),
        (table([12, 12], [12, 12], psnr_registered=[160, 12]), "LEAKS"),  # elsewhere
        (table([40, 12], [12, 12], psnr_flat=[38, 12]), "NOT RECOVERED"),  # dark, and so is it
        (table([40, 12], [12, 12], psnr_flat=[37, 12]), "LEAKS"),
        (table([12, 29.6, 12, 12], [12] * 4, ssim=[0.2, 0.9, 0.2, 0.2]), "PARTIAL"),
        (table([12, 29.6, 12], [12] * 3, ssim=[0.2, 0.9, 0.2], canary=0.1), "PARTIAL"),
        (table([12, 29.6, 12], [12] * 3, ssim=[0.2, 0.4, 0.2]), "NOT RECOVERED"),
        (table([12, 21, 12], [12] * 3, ssim=[0.2, 0.69, 0.2]), "NOT RECOVERED"),
        (table([12, 21, 12], [12] * 3, ssim=[0.2, 0.9, 0.2]), "PARTIAL"),
        (table([27.5], [18], ssim=0.89), "PARTIAL"),  # one update, and there is no mistaking it
        (table([18, 19, 18], [10] * 3, psnr_flat=[18, 19, 18]), "NOT RECOVERED"),  # a flat colour
        (table([18, 19, 18], [10] * 3, psnr_flat=[16, 17, 16]), "PARTIAL"),
        (table([12] * 3, [12] * 3, ssim=0.4, ssim_flat=[0.4] * 3), "NOT RECOVERED"),
        (table([20], [12]), "NOT RECOVERED"),  # one update has no interval
        (table([29.6], [12], ssim=0.9), "PARTIAL"),
        (table([35, 12], []), "LEAKS"),
        (table([25, 12], []), "NOT RECOVERED"),
        (table([29, 28, 29], [], psnr_flat=[26, 26, 26]), "PARTIAL"),  # nobody guessed
        (table([29, 28, 29], [], psnr_flat=[28, 28, 28]), "NOT RECOVERED"),
        (table([19, 18, 19], [], psnr_flat=[12, 12, 12]), "NOT RECOVERED"),
        (table([19, 18, 19], [], ssim=0.6, psnr_flat=[12, 12, 12]), "PARTIAL"),
        (table([29], [], psnr_flat=[26]), "NOT RECOVERED"),
        (table([], [12]), "NO RESULT"),
    ],
)
def test_a_verdict_follows_its_rule(scores: pd.DataFrame, expected: str) -> None:
    assert verdict(scores)["verdict"] == expected


def test_not_recovered_never_says_safe() -> None:
    words = verdict(table([12], [12]))["words"]
    assert "at this budget" in words
    assert "safe" not in words.lower()


def test_no_result_gives_its_reason() -> None:
    failed = [{"attack": "mine", "reason": "the worker died", "kind": "crashed", "job": "x"}]
    assert "the worker died" in verdict(table([], [12]), failed)["words"]


def test_the_worst_case_is_the_closest_image() -> None:
    assert verdict(table([14, 22], [12, 12]))["metrics"]["psnr"]["worst_case"] == 22


def judged(scores: pd.DataFrame, asked: Asked, label: str = "mine") -> dict:
    entries = summarise(scores, Spec(), ["mine", BASELINE], {}, [], asked=asked)
    return next(entry for entry in entries if entry["attack"] == label)


FOUR = Asked(victims=4, trials=1, baseline=BASELINE)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (table([12, 12, 12, 12], [12, 12, 12, 12]), "NOT RECOVERED"),
        (table([12, 12, 12], [12, 12, 12, 12]), "INCOMPLETE"),
        (table([20, 19, 21], [12, 12, 12, 12]), "INCOMPLETE"),
        (table([35, 12, 12], [12, 12, 12, 12]), "LEAKS"),
        (table([12, 12, 12], [12, 12, 12, 12], canary=0.1), "MIS-SPECIFIED"),
        (table([25, 12, 12, 12], [12, 12, 12]), "INCOMPLETE"),
        (table([25, 12, 12, 12], []), "INCOMPLETE"),
        (table([], [12, 12, 12, 12]), "NO RESULT"),
    ],
)
def test_less_than_was_asked_for_is_never_a_failure_to_recover(
    scores: pd.DataFrame, expected: str
) -> None:
    assert judged(scores, FOUR)["verdict"] == expected


def test_a_verdict_names_its_victims_and_compares_the_same_pictures() -> None:
    entry = judged(table([12], [10, 30, 30, 30]), FOUR)
    assert (entry["victims"], entry["victims_of"]) == (1, 4)
    assert entry["baseline"]["psnr"] == 10
    assert "3 of 4 victims could not be scored" in entry["words"]
    assert "1 of 4 victims" in entry["words"]
    for scores in (table([12] * 4, [12] * 4), table([35] * 4, [12] * 4), table([20] * 4, [12] * 4)):
        assert "4 of 4 victims" in judged(scores, FOUR)["words"]
        assert "4 of 4 victims" in judged(scores, FOUR, BASELINE)["words"]
    assert judged(table([], [12]), FOUR)["victims_of"] == 4


def test_a_trial_that_is_missing_leaves_an_attack_incomplete() -> None:
    scores = table([12, 12], [12, 12])
    twice = pd.concat([scores, scores[scores["attack"] == "mine"].assign(trial=1)])
    asked = Asked(victims=2, trials=2, baseline=BASELINE)
    assert judged(twice, asked)["verdict"] == "NOT RECOVERED"
    entry = judged(twice.iloc[:-1], asked)
    assert entry["verdict"] == "INCOMPLETE"
    assert "1 of 4 trials could not be scored" in entry["words"]


def test_the_baseline_is_known_by_what_it_is() -> None:
    scores = table([35, 35], [12, 12])
    named = scores.replace({"attack": {"mine": BASELINE, BASELINE: "a guess"}})
    asked = Asked(victims=2, trials=1, baseline="a guess")
    first, second = summarise(named, Spec(), [BASELINE, "a guess"], {}, [], asked=asked)
    assert (first["verdict"], second["verdict"]) == ("LEAKS", "BASELINE")
    spec = Spec(attacks=[Component(name=BASELINE, title="a guess")], data=DataSpec(clients=3))
    assert asked_of(spec) == Asked(victims=3, trials=1, baseline="a guess")


def test_a_picture_that_stands_out_is_named() -> None:
    entry = verdict(table([12, 29.6, 12, 12], [12] * 4, ssim=[0.2, 0.92, 0.2, 0.2]))
    assert "1 of 4 pictures stands out from a guess" in entry["words"]
    assert "round 1, client 1, image 0, 29.6 dB, SSIM 0.92" in entry["words"]


def test_a_picture_that_came_back_elsewhere_is_told_with_its_shift() -> None:
    entry = verdict(table([12, 12], [12, 12], psnr_registered=[160, 12]))
    assert "12.0 dB (160.0 dB once shifted into place)" in entry["words"]
    assert "shifted" not in verdict(table([35, 12], [12, 12]))["words"]


def test_a_mean_of_one_update_decides_nothing_but_is_told() -> None:
    assert "8.0 dB above a guess may be chance" in verdict(table([20], [12]))["words"]
    assert "may be chance" not in verdict(table([12.5], [12]))["words"]
    alike = verdict(table([20], [12], ssim=0.6))
    assert alike["verdict"] == "NOT RECOVERED"
    assert "8.0 dB and 0.40 SSIM above a guess" in alike["words"]
    assert "chance" not in alike["words"]


def judged_with(scores: pd.DataFrame, *ledger: str) -> dict:
    return summarise(scores, Spec(), ["mine", BASELINE], {"mine": list(ledger)}, [])[0]


@pytest.mark.parametrize(
    "field", ["update", "traffic", "weights", "batch_statistics", "oracle_labels", "tampering"]
)
def test_who_never_looked_at_anything_private_has_guessed(field: str) -> None:
    scores = table([20, 19, 21], [12, 12, 12])
    assert judged_with(scores, "image_size", field)["verdict"] == "PARTIAL"
    blind = judged_with(scores, "image_size", "priors", "surrogate")
    assert (blind["verdict"], blind["recovered"]) == ("BASELINE", 0)
    assert "mine never looked at an update" in blind["words"]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (table([40, 12], [12, 12]), "LEAKS"),
        (table([12, 12], [12, 12], psnr_registered=[160, 12]), "LEAKS"),
        (table([12, 29.6, 12], [12] * 3, ssim=[0.2, 0.9, 0.2]), "PARTIAL"),
    ],
)
def test_no_ledger_overrules_a_picture_that_came_back(scores: pd.DataFrame, expected: str) -> None:
    untold, told = judged_with(scores, "image_size"), judged_with(scores, "update")
    assert (untold["verdict"], told["verdict"]) == (expected, expected)
    assert untold["looked"]
    assert "Its ledger does not say how" in untold["words"]
    assert "ledger" not in told["words"]


def test_who_crashed_before_it_looked_is_not_done() -> None:
    scores = table([12, 12, 12], [12] * 4)
    (entry, _) = summarise(scores, Spec(), ["mine", BASELINE], {"mine": []}, [], asked=FOUR)
    assert entry["verdict"] == "INCOMPLETE"


@pytest.mark.parametrize(
    ("kinds", "declined"),
    [
        (["declined", "declined"], True),
        (["declined", "crashed"], False),
        (["hung", "hung"], False),
        (["declined"], False),  # of one of two victims; the other was never observed
        ([], False),
    ],
)
def test_no_result_tells_who_declined_from_who_is_not_done(
    kinds: list[str], declined: bool
) -> None:
    failed = [{"attack": "mine", "reason": f"it {k}", "kind": k, "job": "x"} for k in kinds]
    entry = verdict(table([], [12, 12]), failed)
    assert (entry["verdict"], entry["declined"]) == ("NO RESULT", declined)
    if "crashed" in kinds:
        assert "it crashed" in entry["words"], "the reason that matters"


SHORT = ("train.rounds=1", "train.clients_per_round=4", "audit.gallery=0")


def audited(root: Path, *overrides: str) -> dict[str, dict]:
    run = audit(small_spec(*SHORT, *overrides), root)
    return {entry["attack"]: entry for entry in run.summary["verdicts"]}


def test_an_audit_knows_pictures_that_are_shifted_alone_or_beside_nobodys_guess(
    tmp_path: Path,
) -> None:
    client = small_spec(*SHORT).cohort(1)[0]
    attacks = (
        "attacks=[{name: 'tests.pretenders:Shifted'}, "
        f"{{name: 'tests.pretenders:Noisy', client: {client}}}, "
        "{name: 'tests.pretenders:Noisy', title: everywhere, noise: 0.05}]"
    )
    found = audited(tmp_path / "run", attacks)
    assert found["Shifted"]["verdict"] == "LEAKS"
    assert found["Shifted"]["metrics"]["psnr"]["worst_case"] < 30
    assert found["Noisy"]["verdict"] == "PARTIAL"
    assert f"round 1, client {client}, image 0" in found["Noisy"]["words"]
    unguessed = audited(
        tmp_path / "blind",
        "threat={model: C, withhold: [image_size]}",
        "attacks=[{name: 'tests.pretenders:Noisy', noise: 0.05}]",
    )
    assert list(unguessed) == ["Noisy"]
    assert unguessed["Noisy"]["verdict"] == "PARTIAL"


@pytest.fixture(scope="module")
def dark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures that are nearly black, each with a faint pattern."""
    root, coin = tmp_path_factory.mktemp("dark"), torch.Generator().manual_seed(0)
    for number in range(12):
        folder = root / f"class-{number % 2}"
        folder.mkdir(exist_ok=True)
        picture = 0.03 * torch.rand(3, 32, 32, generator=coin)
        to_pil_image(picture).save(folder / f"{number}.png")
    return root


def test_an_audit_takes_black_on_dark_pictures_for_nothing(dark: Path, tmp_path: Path) -> None:
    found = audited(
        tmp_path / "run",
        f"data={{name: imagefolder, path: '{dark}', image_size: 32, clients: 4}}",
        "attacks=[{name: 'tests.pretenders:Flat', title: blind}, "
        "{name: 'tests.pretenders:Flat', title: glanced, looks: true}, {name: patch_solve}]",
    )
    for name in ("blind", "glanced"):
        assert found[name]["metrics"]["psnr"]["mean"] > 30
        assert found[name]["recovered"] == 0
    assert found["blind"]["verdict"] == "BASELINE"
    assert found["glanced"]["verdict"] != "LEAKS"
    assert not found["glanced"]["stand_out"]
    assert found["patch_solve"]["verdict"] == "LEAKS"


def test_an_audit_takes_a_constant_on_dim_pictures_for_nothing(tmp_path: Path) -> None:
    images, coin = DataSpec(image_size=32), torch.Generator().manual_seed(0)
    photos_ = images_of(images, "train")
    for number in torch.randperm(len(photos_), generator=coin)[:40].tolist():
        folder = tmp_path / "dim" / f"class-{number % 2}"
        folder.mkdir(exist_ok=True, parents=True)
        to_pil_image(photos_.image(number) * 0.5).save(folder / f"{number}.png")
    data = f"data={{name: imagefolder, path: '{tmp_path / 'dim'}', image_size: 32, clients: 8}}"
    greys = ", ".join(
        f"{{name: 'tests.pretenders:Flat', title: grey {value}, value: {value}, looks: true}}"
        for value in (0.15, 0.25, 0.3)
    )
    found = audited(
        tmp_path / "run", data, "train.clients_per_round=8", f"attacks=[{greys}]", "seed=4"
    )
    gains = []
    for value in (0.15, 0.25, 0.3):
        entry = found[f"grey {value}"]
        gains.append(entry["metrics"]["psnr"]["low"] - entry["baseline"]["psnr"])
        assert entry["verdict"] == "NOT RECOVERED"
    assert max(gains) > 1, "a colour does better than the guess, surely"


def test_a_colour_that_beats_the_guess_on_one_victim_is_no_finding(tmp_path: Path) -> None:
    spec = ("audit.victims=1", "attacks=[{name: 'tests.pretenders:Flat', value: VALUE}]")
    gains = []
    for value in ("0.3", "0.6"):
        overrides = [words.replace("VALUE", value) for words in (*spec, "seed=3")]
        entry = audited(tmp_path / value, *overrides)["Flat"]
        gains.append(entry["metrics"]["psnr"]["mean"] - entry["baseline"]["psnr"])
        assert entry["verdict"] == "BASELINE"
        looked = [words.replace("}]", ", looks: true}]") for words in overrides]
        assert audited(tmp_path / f"{value} looked", *looked)["Flat"]["verdict"] == "NOT RECOVERED"
    assert max(gains) > 1, "one of the colours does better than the guess"


def test_an_attack_that_returns_no_picture_has_no_result(tmp_path: Path) -> None:
    run = audit(small_spec(*SHORT, "attacks=[{name: 'tests.pretenders:Nothing'}]"), tmp_path / "r")
    entry = run.summary["verdicts"][0]
    assert entry["verdict"] == "NO RESULT"
    assert "returned no picture" in entry["words"]


def test_a_crash_beside_a_failure_to_recover_is_no_conclusion(tmp_path: Path) -> None:
    noise = "defenses=[{name: gaussian_noise, std: 10.0, relative: true}]"
    bad = "attacks=[{name: 'tests.faults:Crashes'}, {name: patch_solve}]"
    run = audit(small_spec("train.rounds=1", noise, bad), tmp_path / "run")
    assert [e["verdict"] for e in run.summary["verdicts"][:2]] == ["NO RESULT", "NOT RECOVERED"]
    found = strongest(run.summary)
    assert found.verdict == "NO RESULT"
    assert found.sentence == "No conclusion: Crashes produced no result."
    assert "No conclusion: Crashes produced no result." in run.report.read_text()

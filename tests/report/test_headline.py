"""The headline: what a reader must know first."""

from __future__ import annotations

from typing import Any

import pytest

from fedsim.report.headline import RANK, rank_of, strongest
from fedsim.report.pictures import COLOURS


def entry(verdict: str, attack: str = "a", **more: Any) -> dict[str, Any]:
    about = {"attack": attack, "recovered": 1, "pictures": 2, "lacking": "x", "verdict": verdict}
    return {**about, "metrics": {"psnr": {"worst_case": 12.0}}, **more}


def nothing(attack: str, *, declined: bool) -> dict[str, Any]:
    words = f"{attack} gave no result: it stopped."
    return {"attack": attack, "verdict": "NO RESULT", "words": words, "declined": declined}


def found(*verdicts: dict[str, Any]) -> Any:
    return strongest({"verdicts": list(verdicts), "threat": "C"})


def test_every_verdict_has_a_rank_a_colour_and_a_sentence() -> None:
    for verdict in RANK:
        finding = found(entry(verdict))
        assert (finding.verdict, bool(finding.sentence)) == (verdict, True)
        assert verdict in COLOURS


def test_an_attack_that_crashed_everywhere_comes_before_one_that_did_not_recover() -> None:
    finding = found(entry("NOT RECOVERED"), nothing("b", declined=False))
    assert (finding.verdict, finding.attack) == ("NO RESULT", None)
    assert finding.sentence == "No conclusion: b produced no result."
    assert "b gave no result: it stopped. The other attacks did not recover" in finding.detail
    assert rank_of("NO RESULT", declined=False) == RANK.index("INCOMPLETE")


@pytest.mark.parametrize("verdict", ["LEAKS", "PARTIAL", "MIS-SPECIFIED", "INCOMPLETE"])
def test_a_crash_takes_no_finding_away(verdict: str) -> None:
    assert found(nothing("b", declined=False), entry(verdict)).verdict == verdict


def test_an_attack_that_declined_says_nothing_about_the_others() -> None:
    finding = found(nothing("b", declined=True), entry("NOT RECOVERED"))
    assert finding.verdict == "NOT RECOVERED"
    assert found(nothing("b", declined=True)).sentence.endswith("no attack produced a result.")


def test_who_never_looked_at_an_update_is_no_attack() -> None:
    finding = found(entry("BASELINE"))
    assert finding.sentence == "No conclusion: no attack that looks at an update was run."
    assert found(entry("BASELINE"), entry("NOT RECOVERED", "b")).attack == "b"


def test_a_picture_that_stands_out_is_in_the_headline() -> None:
    place = {"pictures": 1, "of": 4, "where": "round 1, client 2, image 0"}
    finding = found(entry("PARTIAL", stand_out={**place, "psnr": 29.6, "ssim": 0.92}))
    assert "1 of 4 pictures stands out" in finding.sentence
    assert "no clear picture" in found(entry("PARTIAL")).sentence


def test_a_picture_that_came_back_elsewhere_is_told_at_its_closest() -> None:
    moved = {"psnr": {"worst_case": 12.0}, "psnr_registered": {"worst_case": 160.0}}
    finding = found(entry("LEAKS", metrics=moved))
    assert "12.0 dB (160 dB (exact) once shifted into place)" in finding.detail


def test_clients_who_all_refused_are_the_headline() -> None:
    entry_ = {**nothing("a", declined=False), "refused": 4, "victims_of": 0}
    finding = found(entry_)
    assert finding.sentence == "Nothing was uploaded: the guards of all 4 victims refused."
    assert "this run does not say" in finding.detail

"""Words of a verdict: what an entry of the summary says, as one or two careful sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedsim.scoring.recovery import ABOVE_BASELINE_DB, STANDS_OUT_SSIM

PARTIAL_DB, PARTIAL_SSIM = 1.0, 0.05
CLOSER = 0.5  # features that tell something are half as far from the true ones as a grey picture's


def words_of(entry: dict[str, Any]) -> str:
    """What an entry with scores says; "not recovered" never reads as "safe"."""
    name, mean = entry["attack"], entry["metrics"]["psnr"]["mean"]
    base = entry["baseline"]["psnr"]
    against = f" (a guess without the update: {base:.1f} dB)" if base is not None else ""
    behind = f"{entry['victims']} of {entry['victims_of']} victims"
    if entry.get("refused"):
        behind += f" ({entry['refused']} more did not upload, by their guards)"
    if entry["verdict"] == "NOT RECOVERED" and not entry.get("claims", True):
        return f"{name} claims no picture; {behind}.{_features(entry)}"
    return {
        "LEAKS": f"{name} reconstructed the clients' pictures: {mean:.1f} dB on average, "
        f"{closest(entry)} for the worst-hit client{against}; {behind}."
        f"{_which(entry)}{_untold(entry)}",
        "PARTIAL": f"{name} learned more than a guess, {_extent(entry)}: {mean:.1f} dB on "
        f"average{against}; {behind}.{_which(entry)}{_untold(entry)}",
        "NOT RECOVERED": f"{name} did not recover the pictures at this budget: {mean:.1f} dB on "
        f"average{against}; {behind}.{_undecided(entry)}{_features(entry)} A stronger attack may.",
        "INCOMPLETE": f"{name} is not done, because {entry.get('lacking')}: on {behind} no clear "
        f"picture came back, {mean:.1f} dB on average{against}, which says nothing about the rest.",
        "MIS-SPECIFIED": f"{name} attacked a protocol that is not the one the clients followed: "
        f"their true batches, replayed, do not give their updates. Its scores say nothing about "
        f"safety.",
        "BASELINE": f"A guess that never sees the update scores {mean:.1f} dB; {behind}."
        if entry["is_baseline"]
        else f"{name} never looked at an update or anything else that is private, so what it "
        f"scores is a guess: {mean:.1f} dB on "
        f"average{against}; {behind}.",
    }[entry["verdict"]]


def unscored_words(entry: dict[str, Any]) -> str:
    """What an entry without any truth says; it may be right or wrong, and nobody here knows."""
    made, of = entry["made"], entry["victims_of"]
    if entry["is_baseline"]:
        return "A guess that never sees the update; without the truth nothing is compared with it."
    some = f"{made} picture" + ("" if made == 1 else "s")
    labels = entry["labels_read"]
    read = f" It read {labels} label" + ("" if labels == 1 else "s") + "." if labels else ""
    loss = entry["loss"]
    fit = f" Its matching loss is {loss:.3g} in the median." if loss is not None else ""
    why, advice = "no client had a witness", " A witness in the ClientApp tells: "
    advice += "fedsim.witness(trainloader, context)."
    if unbound := entry.get("unbound"):
        why, advice = f"no witness tells the truth ({unbound})", ""
    return (
        f"{entry['attack']} made {some} from {entry['victims']} of {of} updates, and {why}: they "
        f"are not scored, and may be right or wrong.{read}{fit}{advice}"
    )


def _decibel(value: float) -> str:
    return f"{value:.1f} dB"


def closest(entry: dict[str, Any], told: Callable[[float], str] = _decibel) -> str:
    """The closest reconstruction; also once shifted into place, where that makes a difference."""
    in_place = entry["metrics"]["psnr"]["worst_case"]
    shifted = entry["metrics"].get("psnr_registered", {}).get("worst_case")
    if shifted is None or in_place is None or shifted - in_place < ABOVE_BASELINE_DB:
        return told(in_place)
    return f"{told(in_place)} ({told(shifted)} once shifted into place)"


def stand_out_words(stand_out: dict[str, Any]) -> str:
    """How many pictures stand out from a guess, and the closest of them."""
    count, of = stand_out["pictures"], stand_out["of"]
    verb = "stands" if count == 1 else "stand"
    return (
        f"{count} of {of} pictures {verb} out from a guess (the closest: {stand_out['where']}, "
        f"{stand_out['psnr']:.1f} dB, SSIM {stand_out['ssim']:.2f})"
    )


def _extent(entry: dict[str, Any]) -> str:
    if not entry["stand_out"]:
        return "without a clear picture"
    return f"and {stand_out_words(entry['stand_out'])}"


def _untold(entry: dict[str, Any]) -> str:
    """A picture that came back counts, whatever the ledger says; that it does not say how is
    told."""
    if not entry.get("untold"):
        return ""
    return " Its ledger does not say how: it names nothing that is private."


def _which(entry: dict[str, Any]) -> str:
    """Which pictures those are that leaked, where the model saw others than the client has."""
    found = entry.get("originals")
    if not found:
        return ""
    return (
        f" These are the pictures as the model saw them, augmented: {found['seen']} of "
        f"{found['of']} came back; of the originals {found['originals']} "
        f"(the closest: {found['closest_original']:.1f} dB)."
    )


def _features(entry: dict[str, Any]) -> str:
    """What the head read of the pictures, where an attack tells."""
    found = entry.get("features")
    if not found:
        return ""
    mean, free = found["mean"], found["free"]
    told = (
        f"of {found['of']} pictures came back at a cosine of {mean:.4f} on average, "
        f"{found['least']:.4f} at least (a grey picture's: {free:.4f})"
    )
    if free is not None and 1 - mean > CLOSER * (1 - free):
        return (
            f" What it takes for the features that the head read {told}: that is hardly more than "
            f"is had for nothing."
        )
    return (
        f" The features that the head read {told}: they tell what a picture shows to whoever has "
        f"others to compare."
    )


def _undecided(entry: dict[str, Any]) -> str:
    """One update has no interval, so a mean above the guess decides nothing; but it is told, and
    called chance only where it does not look like the picture either."""
    mean, base = entry["metrics"]["psnr"]["mean"], entry["baseline"]["psnr"]
    if entry["groups"] > 1 or base is None or mean - base <= PARTIAL_DB:
        return ""
    alike, guess = entry["metrics"].get("ssim", {}).get("mean"), entry["baseline"].get("ssim")
    if alike is not None and guess is not None and alike - guess >= STANDS_OUT_SSIM:
        return (
            f" It is {mean - base:.1f} dB and {alike - guess:.2f} SSIM above a guess, on one "
            f"update alone, which has no interval."
        )
    return f" That it is {mean - base:.1f} dB above a guess may be chance with one update alone."

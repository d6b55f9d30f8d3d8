"""Columns: what the page and the table say of a row, each in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedsim.board.rows import Row
from fedsim.core.metrics import METRICS
from fedsim.report.formats import DASH, missing, number, percent


@dataclass(frozen=True)
class Column:
    """One column of the page: by what it is sorted, and what is shown of it."""

    title: str
    hint: str
    value: Callable[[Row], float | str | None]
    shown: Callable[[Row], str]
    under: Callable[[Row], str] = lambda row: ""


def _of(name: str, how: Callable[[float | None], str]) -> dict[str, Any]:
    return {"value": lambda row: row.numbers[name], "shown": lambda row: how(row.numbers[name])}


def _span(row: Row) -> str:
    low, high = row.numbers["psnr_low"], row.numbers["psnr_high"]
    return "" if missing(low) or low == high else f"{number(low, 1)} to {number(high, 1)}"


def _auc_span(row: Row) -> str:
    low, high = row.numbers["membership_low"], row.numbers["membership_high"]
    return "" if missing(low) or low == high else f"{number(low)} to {number(high)}"


def _kilobytes(row: Row) -> str:
    return DASH if row.upload_bytes is None else f"{row.upload_bytes / 1024:.0f}"


def _epsilon(row: Row) -> str:
    return DASH if row.epsilon is None else f"{row.epsilon:.3g}"


def _thousandths(value: float | None) -> str:
    return number(value, METRICS["ssim"].digits)


def _tenths(value: float | None) -> str:
    return number(value, METRICS["psnr"].digits)


COLUMNS = (
    Column(
        "Worst case, dB",
        "PSNR of the closest reconstruction by any member of the suite, mean over pictures, and "
        "its 95 % interval; an exact copy is 160",
        **_of("psnr", _tenths),
        under=_span,
    ),
    Column(
        "Best known, dB",
        "The worst case together with what others submitted, and who did",
        value=lambda row: row.best.psnr if row.best else None,
        shown=lambda row: _tenths(row.best.psnr) if row.best else DASH,
    ),
    Column(
        "Recovered",
        "Pictures that came back in the worst case, by the rule of LEAKS",
        **_of("recovered", percent),
    ),
    Column(
        "Accuracy kept",
        "Accuracy as a share of that of the undefended federation, and as it is",
        value=lambda row: row.kept,
        shown=lambda row: percent(row.kept),
        under=lambda row: "" if row.accuracy is None else f"{percent(row.accuracy)} right",
    ),
    Column(
        "Worst client, dB",
        "The worst case of the client that it is highest for",
        **_of("psnr_client", _tenths),
    ),
    Column(
        "Worst picture, dB",
        "The closest reconstruction of all",
        **_of("psnr_picture", _tenths),
    ),
    Column(
        "SSIM",
        "Of the worst case, mean over pictures; an exact copy is 1",
        **_of("ssim", _thousandths),
    ),
    Column(
        "LPIPS",
        "Of the worst case, mean over pictures; an exact copy is 0",
        **_of("lpips", _thousandths),
    ),
    Column(
        "Identified",
        "Worst cases that are nearer to their own picture than to any other of a gallery",
        **_of("identified", percent),
    ),
    Column(
        "Labels",
        "Labels that were named, as a multiset, by the member that named most",
        **_of("labels", percent),
    ),
    Column(
        "Membership",
        "Area under the curve of the strongest attack on membership, on matched controls, and its "
        "interval; a coin has 0.5",
        **_of("membership", number),
        under=_auc_span,
    ),
    Column(
        "Picked, dB",
        "PSNR of what the attacker would have picked by its own evidence, without the truth",
        **_of("picked_psnr", _tenths),
    ),
    Column(
        "KB a client",
        "One upload, written as tightly as the defense allows",
        value=lambda row: row.upload_bytes,
        shown=_kilobytes,
    ),
    Column(
        "Epsilon",
        "Differential privacy after all rounds, for the client that spends most",
        value=lambda row: row.epsilon,
        shown=_epsilon,
    ),
    Column(
        "Suite",
        "The version of the attacks",
        value=lambda row: row.suite,
        shown=lambda row: row.suite,
    ),
)


def table_line(row: Row) -> dict[str, Any]:
    """A row of ``board.csv``: every number as it is, and nothing of a picture."""
    best = row.best
    return {
        "federation": row.federation.key,
        "model": row.federation.model,
        "data": row.federation.data,
        "batch_size": row.federation.batch,
        "protocol": row.federation.protocol,
        "threat": row.federation.threat,
        "defense": row.defense,
        "strength": row.strength,
        "suite": row.suite,
        "pictures": row.pictures,
        "victims": row.victims,
        "runs": row.seeds,
        **row.numbers,
        "worst_by": row.worst_by[0][0],
        "picked": row.picked_by[0][0] if row.picked_by else None,
        "best_known_psnr": best.psnr if best else None,
        "best_known_ssim": best.ssim if best else None,
        "best_known_recovered": best.recovered if best else None,
        "best_known_by": best.record.name if best else None,
        "best_known_link": best.record.link if best else None,
        "submissions": len(row.submissions),
        "accuracy": row.accuracy,
        "accuracy_kept": row.kept,
        "upload_bytes": row.upload_bytes,
        "epsilon": row.epsilon,
        "flags": ", ".join(dict.fromkeys(flag.flag for flag in row.flags)),
        "dominated": row.dominated,
        "fedsim": "; ".join(row.measured_by),
        "specs": " ".join(row.specs),
    }

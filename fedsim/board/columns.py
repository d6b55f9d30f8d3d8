"""Columns: what the page and the table say of a row, each in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedsim.board.rows import Row
from fedsim.core.metrics import METRICS
from fedsim.report.formats import DASH, decibel, missing, number, percent


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


_digits = {name: metric.digits for name, metric in METRICS.items()}

COLUMNS = (
    Column(
        "Worst case",
        "PSNR of the closest reconstruction by any member of the suite, mean over pictures, and "
        "its 95 % interval",
        **_of("psnr", decibel),
        under=_span,
    ),
    Column("Worst client", "The same for the client that it is highest for",
           **_of("psnr_client", decibel)),
    Column("Worst picture", "The closest reconstruction of all", **_of("psnr_picture", decibel)),
    Column("SSIM", "Of the worst case, mean over pictures; 1 is an exact copy",
           **_of("ssim", lambda v: number(v, _digits["ssim"]))),
    Column("LPIPS", "Of the worst case, mean over pictures; 0 is an exact copy",
           **_of("lpips", lambda v: number(v, _digits["lpips"]))),
    Column("Recovered", "Pictures that came back by the rule of LEAKS", **_of("recovered", percent)),
    Column("Identified", "Worst cases that are nearer to their own picture than to any other of a "
           "gallery", **_of("identified", percent)),
    Column("Labels", "Labels that were named, as a multiset", **_of("labels", percent)),
    Column("Membership", "Area under the curve of the strongest attack on membership, on matched "
           "controls; 0.5 is a coin", **_of("membership", number), under=_auc_span),
    Column("Picked", "PSNR of what the attacker would have picked by its own evidence, without the "
           "truth", **_of("picked_psnr", decibel)),
    Column(
        "Best known",
        "The worst case with what others submitted",
        value=lambda row: row.best.psnr if row.best else None,
        shown=lambda row: decibel(row.best.psnr) if row.best else DASH,
    ),
    Column(
        "Accuracy kept",
        "Accuracy beside that of the undefended federation",
        value=lambda row: row.kept,
        shown=lambda row: percent(row.kept),
        under=lambda row: "" if row.accuracy is None else f"{percent(row.accuracy)} in all",
    ),
    Column("KB a client", "One upload, as tightly as the defense can write it",
           value=lambda row: row.upload_bytes, shown=_kilobytes),
    Column("Epsilon", "Differential privacy after all rounds, for the client that spends most",
           value=lambda row: row.epsilon, shown=_epsilon),
    Column("Suite", "The version of the attacks", value=lambda row: row.suite,
           shown=lambda row: row.suite),
)  # fmt: skip


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
        "picked": row.picked_by[0][0],
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

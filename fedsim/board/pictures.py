"""Pictures of a row: a few of the clients' own, each beside the closest that any member of the
suite came and what an attacker would have picked."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import pandas as pd
from PIL import Image
from torch import Tensor

from fedsim.board.rows import Row
from fedsim.campaign.plan import jobs_of, victims
from fedsim.core.errors import FedsimError
from fedsim.report.formats import decibel
from fedsim.report.pictures import Pair, data_uri, load_pairs, spread, to_image

SHOWN, SIDE = 4, 96  # pictures of a row, and pixels per side at most
PIXEL_BUDGET = 12_000_000  # of all pictures on a board
LOSSLESS = 64  # pixels: small pictures stay as they are


@dataclass(frozen=True)
class Triple:
    """One true picture, the worst case for its client, and what the attacker would have picked."""

    original: str
    worst: str
    picked: str | None
    worst_words: str
    picked_words: str


def triples_of(row: Row, budget: int = SHOWN) -> tuple[list[Triple], str | None]:
    """From the closest to the farthest; without any, why."""
    tables = [entry.pictures.assign(entry=at) for at, entry in enumerate(row.entries)]
    chosen = spread(pd.concat(tables, ignore_index=True), max(1, min(SHOWN, budget)))
    shown: dict[int, Triple] = {}
    try:
        for at, group in chosen.groupby("entry"):
            shown |= _of_one(row, int(str(at)), group)
    except FedsimError as error:  # as a rule the vault's key is elsewhere
        return [], f"its pictures cannot be shown: {error}"
    return [shown[int(index)] for index in chosen.index if int(index) in shown], None


def fair_share(rows: list[Row]) -> int:
    """How many pictures each row may show, so that the page stays one that can be mailed."""
    sides = [min(SIDE, int(row.entries[0].spec.data.image_size)) for row in rows]
    return PIXEL_BUDGET // max(1, 3 * sum(side**2 for side in sides))


def _of_one(row: Row, at: int, group: pd.DataFrame) -> dict[int, Triple]:
    """The pictures of one run, by the line of the table that they are of."""
    entry = row.entries[at]
    own = set(zip(group["round"], group["client"], strict=True))
    jobs = jobs_of(entry.run, entry.spec, [one for one in victims(entry.spec) if one in own])
    columns = ["round", "client", "image", "digest"]
    worst = group[[*columns, "attack", "trial", "psnr", "ssim"]]
    picked = group[[*columns, "picked", "picked_trial", "picked_psnr", "picked_ssim"]]
    picked = picked.set_axis(worst.columns, axis=1)
    picked = picked[picked["attack"] != ""]
    pairs = [
        {_place(pair): pair for pair in load_pairs(entry.run, jobs, rows, rows)}
        for rows in (worst, picked)
    ]
    found = {}
    for index, line in zip(group.index, group.to_dict("records"), strict=True):
        place = (line["round"], line["client"], line["image"])
        if place in pairs[0]:
            found[int(index)] = _triple(pairs[0][place], pairs[1].get(place))
    return found


def _place(pair: Pair) -> tuple[int, int, int]:
    return pair.row["round"], pair.row["client"], pair.row["image"]


def _triple(worst: Pair, picked: Pair | None) -> Triple:
    words = [
        "" if pair is None else f"{pair.row['attack']}, {decibel(pair.row['psnr'])}"
        for pair in (worst, picked)
    ]
    guess = None if picked is None else _small(picked.guess)
    return Triple(_small(worst.truth), _small(worst.guess), guess, *words)


def _small(picture: Tensor) -> str:
    """A picture as a page holds it: small ones as they are, large ones reduced."""
    image = to_image(picture)
    if max(image.size) <= LOSSLESS:
        return data_uri(image)
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()

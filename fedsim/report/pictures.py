"""Pictures: originals beside reconstructions, for the page and as one contact sheet."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from fedsim.campaign.jobs import Job
from fedsim.core.attack import Reconstruction
from fedsim.core.files import write_atomically
from fedsim.core.run import Run
from fedsim.report.formats import count, decibel, headline, label
from fedsim.report.headline import Finding
from fedsim.scoring.scores import CLAIMED, load_pictures, results_of

MOST_SHOWN, LEAST_SHOWN, BASELINE_SHOWN = 16, 8, 4  # rows of four
PIXEL_BUDGET = 4_000_000  # over all galleries: a report of many large pictures stays mailable
PIXELATED_BELOW = 128
COLOURS = {
    "LEAKS": "#a8261b",
    "PARTIAL": "#8a5200",
    "MIS-SPECIFIED": "#6b3fa0",
    "INCOMPLETE": "#1f6464",
    "NOT RECOVERED": "#41566e",
    "NOT SCORED": "#41566e",
    "NO RESULT": "#5c636b",
}


@dataclass(frozen=True)
class Pair:
    """One true image and what an attack made of it; ``row`` is its line of the scores."""

    row: dict[str, Any]
    truth: Tensor
    guess: Tensor
    trials: bool
    redacted: bool = False
    before: Tensor | None = None  # what the client has, where the model saw another view of it

    @property
    def source(self) -> str | None:
        """The client's own picture, where the model saw another view of it and it may be shown."""
        return None if self.redacted or self.before is None else data_uri(self.before)

    @property
    def original(self) -> str | None:
        """None where the report must not show it."""
        return None if self.redacted else data_uri(self.truth)

    @property
    def reconstruction(self) -> str:
        return data_uri(mosaic(self.guess) if self.redacted else self.guess)

    @property
    def place(self) -> str:
        words = f"round {self.row['round']}, client {self.row['client']}"
        if self.row["in_batch"] > 1:
            words += f", image {self.row['image'] + 1}"
        return words + (f", trial {self.row['trial'] + 1}" if self.trials else "")

    @property
    def scores(self) -> str:
        words = headline(self.row)
        if self.before is None:
            return words
        return f"{words}; {decibel(self.row['psnr_original'])} against the original"

    @property
    def labels(self) -> str:
        if self.redacted:
            return ""
        recovered = label(self.row["label_recovered"])
        guessed = f"recovered as {recovered}" if recovered != "–" else "not recovered"
        return f"label {label(self.row['label_true'])}, {guessed}"

    @property
    def original_alt(self) -> str:
        what = "Original picture" if self.before is None else "Picture as the model saw it"
        return f"{what} of {self.place}"

    @property
    def reconstruction_alt(self) -> str:
        return f"Reconstruction by {self.row['attack']} of {self.place}: {self.scores}"

    @property
    def look(self) -> str:
        """The CSS class: small pictures are enlarged with their pixels kept."""
        return "small" if min(self.truth.shape[-2:]) < PIXELATED_BELOW else "large"


@dataclass(frozen=True)
class Frame:
    """What an attack had after so many steps."""

    step: int
    picture: str
    alt: str


@dataclass(frozen=True)
class Gallery:
    """The pictures of one attack, and how it came to the closest of them."""

    attack: str
    verdict: str
    pairs: list[Pair]
    images: int
    film: list[Frame]
    filmed: str  # whose film it is
    claimed: int  # how many of the images the attack has a picture for

    @property
    def extent(self) -> str:
        """How many of the images are shown, and which."""
        shown = len(self.pairs)
        if self.claimed < self.images:
            return (
                f"{shown} of the {self.claimed} images that it has a picture for, of "
                f"{self.images} in all, spread evenly from the closest to the farthest."
            )
        if shown == self.images:
            return f"{count(shown, 'image')}, the closest first."
        return (
            f"{shown} of {self.images} images, spread evenly from the closest to the farthest; "
            f"{self.images - shown} more are in the run directory."
        )


def galleries(
    run: Run,
    jobs: list[Job],
    scores: pd.DataFrame,
    verdicts: list[dict[str, Any]],
    *,
    redacted: bool = False,
) -> list[Gallery]:
    """One gallery for each attack that has images."""
    entries = [entry for entry in verdicts if entry["images"]]
    pair_pixels = 2 * run.spec.data.image_size**2
    fair = PIXEL_BUDGET // (pair_pixels * max(1, len(entries)))
    most = min(MOST_SHOWN, max(LEAST_SHOWN, fair))
    shown = []
    for entry in entries:
        name = entry["attack"]
        attack_scores = scores[scores["attack"] == name]
        guess = entry["verdict"] == "BASELINE"
        claimed = claimed_in(attack_scores)
        rows = spread(claimed, min(most, BASELINE_SHOWN) if guess else most)
        pairs = [replace(p, redacted=redacted) for p in load_pairs(run, jobs, scores, rows)]
        film, whose = film_of(jobs, attack_scores, redacted=redacted)
        about = (len(attack_scores), film, whose, len(claimed))
        shown.append(Gallery(name, entry["verdict"], pairs, *about))
    return shown


@dataclass(frozen=True)
class Made:
    """One picture that an attack made, where nobody knows the true one."""

    picture: Tensor
    round: int
    client: int
    label: int | None
    loss: float | None
    redacted: bool = False

    @property
    def uri(self) -> str:
        return data_uri(mosaic(self.picture) if self.redacted else self.picture)

    @property
    def place(self) -> str:
        return f"round {self.round}, client {self.client}"

    @property
    def alt(self) -> str:
        return f"Reconstruction of {self.place}, not compared with anything"

    @property
    def look(self) -> str:
        return "small" if min(self.picture.shape[-2:]) < PIXELATED_BELOW else "large"


@dataclass(frozen=True)
class Unscored:
    """The pictures of one attack on updates that nobody has the truth of."""

    attack: str
    verdict: str
    made: list[Made]
    images: int


def unscored(
    run: Run, jobs: list[Job], verdicts: list[dict[str, Any]], *, redacted: bool = False
) -> list[Unscored]:
    """One gallery for each attack of a run without truth; of many pictures, the first of each
    update first."""
    found = []
    entries = [entry for entry in verdicts if entry.get("made")]
    for entry in entries:
        own = [job for job in jobs if job.label == entry["attack"] and not job.trial]
        by_place: list[tuple[int, Made]] = []
        for job, result in results_of(own, run.spec.seed):
            alike = result.labels is not None and len(result.labels) == len(result.images)
            for place, picture in enumerate(result.images[:MOST_SHOWN]):
                known = int(result.labels[place]) if alike and result.labels is not None else None
                about = (job.round, job.client, known, result.loss, redacted)
                by_place.append((place, Made(picture, *about)))
        first = sorted(by_place, key=lambda pair: pair[0])
        most = BASELINE_SHOWN if entry["verdict"] == "BASELINE" else MOST_SHOWN
        shown = [made for _, made in first[:most]]
        found.append(Unscored(entry["attack"], entry["verdict"], shown, entry["made"]))
    return found


def claimed_in(own: pd.DataFrame) -> pd.DataFrame:
    """The rows that an attack has a picture for, where it has any; tables of older versions do not
    tell, and count as all."""
    if CLAIMED not in own:
        return own
    claimed = own[own[CLAIMED].fillna(True).astype(bool)]
    return claimed if len(claimed) else own


def film_of(
    jobs: list[Job], own: pd.DataFrame, *, redacted: bool = False
) -> tuple[list[Frame], str]:
    """How an attack came to the batch with its closest picture.

    The order of a reconstructed batch means nothing, so a frame belongs to no true picture; it is
    shown as what it is, the first image of the attack's batch.
    """
    best = own.sort_values("psnr").iloc[-1]
    at = (best["attack"], best["round"], best["client"], best["trial"])
    job = next(job for job in jobs if (job.label, job.round, job.client, job.trial) == at)
    film = Reconstruction.load(job.result).film
    frames = [_frame(step, images[0], redacted) for step, images in film.items()]
    return frames, f"round {job.round}, client {job.client}"


def _frame(step: int, image: Tensor, redacted: bool) -> Frame:
    shown = mosaic(image) if redacted else image
    return Frame(step, data_uri(shown), f"The attack's first image after step {step}")


def mosaic(picture: Tensor, blocks: int = 5) -> Tensor:
    """Coarse blocks of mean colour: that something is there, not what."""
    coarse = torch.nn.functional.adaptive_avg_pool2d(picture[None], blocks)
    return torch.nn.functional.interpolate(coarse, picture.shape[-2:], mode="nearest")[0]


def spread(own: pd.DataFrame, most: int) -> pd.DataFrame:
    """At most ``most`` rows, evenly from the closest reconstruction to the farthest."""
    ranked = own.sort_values("psnr", ascending=False, kind="stable")
    if len(ranked) <= most:
        return ranked
    return ranked.iloc[np.linspace(0, len(ranked) - 1, most).round().astype(int)]


def load_pairs(run: Run, jobs: list[Job], scores: pd.DataFrame, rows: pd.DataFrame) -> list[Pair]:
    """The pictures of these rows, in their order; each job is opened once."""
    by_key = {(job.label, job.round, job.client, job.trial): job for job in jobs}
    keys = ["attack", "round", "client", "trial"]
    several = bool((scores["trial"] > 0).any())
    pairs: dict[int, Pair] = {}
    for key, group in rows.groupby(keys):
        job = by_key.get(tuple(key))  # type: ignore[arg-type]
        pictures = load_pictures(run, job) if job else None
        if pictures is None:
            continue
        for index, row in zip(group.index, group.to_dict("records"), strict=True):
            image = int(row["image"])
            line = {**{str(k): v for k, v in row.items()}, "in_batch": len(pictures.truth)}
            before = None if pictures.before is None else pictures.before[image]
            shown = (pictures.truth[image], pictures.guess[image])
            pairs[int(index)] = Pair(line, *shown, several, before=before)
    return [pairs[int(index)] for index in rows.index if int(index) in pairs]


def closest(
    run: Run,
    jobs: list[Job],
    scores: pd.DataFrame,
    attack: str | None,
    *,
    redacted: bool = False,
) -> Pair | None:
    """The best reconstruction of this attack."""
    attack_scores = scores[scores["attack"] == attack]
    pairs = load_pairs(run, jobs, scores, spread(attack_scores, 1)) if len(attack_scores) else []
    return replace(pairs[0], redacted=redacted) if pairs else None


def to_image(picture: Tensor) -> Image.Image:
    """``picture`` (3, H, W) in [0, 1]."""
    values = (picture.clamp(0, 1) * 255).round().byte()
    return Image.fromarray(values.permute(1, 2, 0).contiguous().numpy())


def data_uri(picture: Tensor | Image.Image) -> str:
    """A PNG at its own size."""
    image = to_image(picture) if isinstance(picture, Tensor) else picture
    return "data:image/png;base64," + base64.b64encode(_png(image)).decode()


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def icon(verdict: str) -> str:
    """A favicon in the verdict's colour; without one, browsers go and ask for it."""
    image = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    ImageDraw.Draw(image).ellipse((6, 6, 57, 57), fill=COLOURS[verdict])
    return data_uri(image.resize((32, 32), Image.Resampling.LANCZOS))


# The contact sheet, in pixels.
COLUMNS, BANDS, SIDE, GAP, MARGIN, LINE = 8, 2, 128, 8, 24, 22


def write_grid(run: Run, jobs: list[Job], scores: pd.DataFrame, finding: Finding) -> None:
    """``grid.png``: originals over reconstructions of the strongest attack."""
    path = run.grid
    attack_scores = scores[scores["attack"] == finding.attack]
    pairs = load_pairs(run, jobs, scores, spread(attack_scores, COLUMNS * BANDS))
    if not pairs:
        path.unlink(missing_ok=True)
        return
    subtitle = f"{finding.attack}, {len(pairs)} of {count(len(attack_scores), 'image')}"
    sheet = contact_sheet(pairs, subtitle, finding.verdict)
    write_atomically(path, _png(sheet))


def contact_sheet(pairs: list[Pair], subtitle: str, verdict: str) -> Image.Image:
    """Bands of originals over reconstructions, with the PSNR under each."""
    columns = min(COLUMNS, len(pairs))
    bands = [pairs[start : start + columns] for start in range(0, len(pairs), columns)]
    left = MARGIN + 26
    head = MARGIN + LINE + 14
    band_height = 2 * SIDE + GAP + LINE + 14
    width = max(left + columns * (SIDE + GAP) - GAP + MARGIN, 440)
    sheet = Image.new("RGB", (width, head + len(bands) * band_height + MARGIN - 14), "#ffffff")
    draw = ImageDraw.Draw(sheet)
    strong, plain = _font(15, bold=True), _font(13)
    draw.text((MARGIN, MARGIN), verdict, font=strong, fill=COLOURS[verdict])
    beside = MARGIN + draw.textlength(verdict, font=strong) + 12
    draw.text((beside, MARGIN + 2), subtitle, font=plain, fill="#3c444d")
    for number_, band in enumerate(bands):
        top = head + number_ * band_height
        for word, y in (("original", top), ("reconstruction", top + SIDE + GAP)):
            _sideways(sheet, word, MARGIN, y)
        for column, pair in enumerate(band):
            x = left + column * (SIDE + GAP)
            sheet.paste(_fit(pair.truth), (x, top))
            sheet.paste(_fit(pair.guess), (x, top + SIDE + GAP))
            words = decibel(pair.row["psnr"])
            offset = (SIDE - draw.textlength(words, font=plain)) / 2
            draw.text((x + offset, top + 2 * SIDE + GAP + 5), words, font=plain, fill="#3c444d")
    return sheet


def _fit(picture: Tensor) -> Image.Image:
    image = to_image(picture)
    small = min(image.size) < PIXELATED_BELOW
    way = Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
    return image.resize((SIDE, SIDE), way)


def _sideways(sheet: Image.Image, word: str, x: int, y: int) -> None:
    strip = Image.new("RGB", (SIDE, 18), "#ffffff")
    draw, font = ImageDraw.Draw(strip), _font(13)
    draw.text(((SIDE - draw.textlength(word, font=font)) / 2, 0), word, font=font, fill="#6a727b")
    sheet.paste(strip.rotate(90, expand=True), (x, y))


def _font(size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    """The font in matplotlib's wheel, which is on every machine."""
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/{name}", size)

"""Imprint: whole batches from one update of a ViT whose weights the manoeuvre of the same name set.

The weights that a client received say how to read its update; the manoeuvre's own words
(``view.chosen``) only say which coordinate is what. Tokens come out of the bins by peeling and
prove themselves; their code says at which place of the picture they stand, their signature in which
picture. A picture is the patches that share a signature, and what is not read is filled in from
what surrounds it, and said to be.

A mean over a cohort is read as the batch of all its pictures. Where the traffic is granted and a
client shows the same pictures again, what one round left out is taken from earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.attacks.closed import fold_patches
from fedsim.attacks.closed.peeling import Reader, Tokens, read_bins
from fedsim.attacks.labels import recover_labels
from fedsim.attacks.manoeuvres.imprinting import Layout
from fedsim.attacks.transformers import transformer_parts
from fedsim.core.anatomy import VitParts, head_names
from fedsim.core.attack import Attack, Progress, Reconstruction
from fedsim.core.epochs import samples_of_epoch
from fedsim.core.errors import AttackError, NotGranted
from fedsim.core.knowledge import View
from fedsim.core.observation import Public
from fedsim.core.spec import Upload

_SAME = 0.06  # the distance of two signatures of one picture; those of two are about 1.5 apart
_FINEST = 1e-3  # the same, where pictures are so much alike that more would confuse them
_FEWEST = 3  # tokens that make a picture, lest a mixture that passed for a token makes one
_AGREE = 0.05  # root mean square, of a patch in two rounds, as the model sees it
_SWEEPS = 100  # of the filling: a patch is some 16 pixels wide


@dataclass(frozen=True)
class Imprint(Attack):
    """``rounds``: how many updates of the client are read at most, this one and those before it,
    where patches are missing and the traffic is granted."""

    rounds: Annotated[int, Field(ge=1)] = 4

    @property
    def needs(self) -> frozenset[str]:
        shape = {"architecture", "image_size", "normalisation", "batch_size"}
        return frozenset({"update", "weights", "tampering"} | shape)

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"local_steps", "traffic"})

    def check_model(self, model: nn.Module, public: Public) -> None:
        transformer_parts(model, "imprint")

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        model = view.model()
        parts = transformer_parts(model, "imprint")
        most = _most_pictures(view)
        reading = read_update(view, model, parts)
        notes = reading.notes
        pictures = reading.pictures[:most]
        surplus = sum(len(picture.patches) for picture in reading.pictures[most:])
        if not pictures:
            raise AttackError(
                "no token came out of the update alone: noise, or many more pictures than bins."
            )
        progress(1, self.rounds, _missing(pictures, parts))
        if _missing(pictures, parts) > 0 and self.rounds > 1 and view.grants("traffic"):
            notes += self._earlier(view, pictures, parts, progress)
        images = torch.stack([self._image(picture, view, parts) for picture in pictures])
        lost = reading.unplaced + surplus
        for index, picture in enumerate(pictures):
            read = len(picture.patches)
            notes.append(
                f"picture {index + 1}: {read} of {parts.tokens} patches read, "
                f"{parts.tokens - read} filled in from what surrounds them"
            )
        notes.append(f"{lost} tokens could not be placed")
        if len(pictures) < most:
            notes.append(f"{most - len(pictures)} of {most} pictures did not show")
        return Reconstruction(
            images=images.float(),
            labels=_labels(view, model, pictures, notes),
            loss=_missing(pictures, parts),
            notes=notes,
        )

    def _earlier(
        self, view: View, pictures: list[Picture], parts: VitParts, progress: Progress
    ) -> list[str]:
        """Take missing patches from earlier rounds; what came of it, in words."""
        traffic, gained, used = view.traffic, 0, 0
        before = [at for at in traffic.addresses if at[1] == view.client and at[0] < view.round]
        for done, at in enumerate(reversed(before[-(self.rounds - 1) :])):
            try:
                older = traffic.open(*at)
                reading = read_update(older, older.model(), parts)
            except (AttackError, NotGranted):
                continue  # a round in which nothing was imprinted
            merged = merge(pictures, reading.pictures)
            gained, used = gained + merged, used + bool(merged)
            progress(done + 2, self.rounds, _missing(pictures, parts))
            if not _missing(pictures, parts):
                break
        return [f"{gained} patches taken from {used} earlier rounds"] if gained else []

    def _image(self, picture: Picture, view: View, parts: VitParts) -> Tensor:
        mean, std = (torch.tensor(c, dtype=torch.float64).view(3, 1, 1) for c in view.normalisation)
        p, q = parts.patch_size
        patches = torch.zeros(parts.tokens, 3 * p * q, dtype=torch.float64)
        there = torch.zeros(parts.tokens, dtype=torch.bool)
        for place, patch in picture.patches.items():
            patches[place], there[place] = patch, True
        known = there[:, None].expand(-1, 3 * p * q).double()
        image = (fold_patches(patches, parts) * std + mean).clamp(0, 1)
        return filled(image, fold_patches(known.contiguous(), parts)[0] > 0)


@dataclass
class Picture:
    """What was read of one picture: its signature, patches by place, as the model sees them, and
    the weight by which it entered the update."""

    signature: Tensor
    patches: dict[int, Tensor]
    weight: float


@dataclass
class Reading:
    """Pictures, those with most patches first; how many tokens are in none of them."""

    pictures: list[Picture]
    unplaced: int
    notes: list[str] = field(default_factory=list)


def read_update(view: View, model: nn.Module, parts: VitParts) -> Reading:
    """The pictures behind one update, patch by patch."""
    chosen = view.chosen
    layout = Layout.told(chosen)
    width = model.get_parameter(parts.patch_weight).shape[0]
    if (layout.width, layout.grid, layout.patch) != (width, parts.grid, parts.patch_size):
        raise AttackError("the manoeuvre was made for another model than this one.")
    names = list(parts.blocks[: int(chosen.get("blocks", 0))])
    norm = model.get_submodule(f"{parts.blocks[0]}.norm2")
    bins = read_bins(view.update.tensors, view.weights, names, layout)
    tokens = Reader(bins, layout, float(getattr(norm, "eps", 0.0))).read()
    basis = view.weights[parts.patch_weight].double().flatten(1)
    pixels = basis[: layout.pixels]
    patches = tokens.x[:, : layout.pixels] @ (pixels / pixels.square().sum(1, keepdim=True))
    signature = tokens.x[:, layout.signature_at]
    if layout.normed and parts.position:  # the signature came after a norm that divided the rest
        places = parts.rows_of(view.weights[parts.position].double())
        embedded = patches @ basis.T + places[tokens.place]
        signature = signature / embedded.std(1, correction=0, keepdim=True)
    weight = tokens.weight * (1.0 if _pooled_first(model) else tokens.size)
    return gather(tokens, signature, patches, weight, min(_FEWEST, parts.tokens))


def gather(
    tokens: Tokens, signature: Tensor, patches: Tensor, weight: Tensor, fewest: int
) -> Reading:
    """Tokens that share a signature make a picture. Of two that claim one place, the one that more
    bins showed is believed, and none where they are even."""
    pictures, unplaced = [], 0
    for mine in _groups(torch.arange(len(tokens.place)), signature, tokens.place, _SAME):
        best = _undisputed(mine, tokens)
        unplaced += len(mine) - len(best)
        if len(best) < fewest:
            unplaced += len(best)
            continue
        found = {int(tokens.place[i]): patches[i] for i in best}
        centre = signature[mine].median(0).values
        pictures.append(Picture(centre, found, float(weight[best].median())))
    pictures.sort(key=lambda picture: -len(picture.patches))
    return Reading(pictures, unplaced)


def _groups(left: Tensor, signature: Tensor, place: Tensor, radius: float) -> list[Tensor]:
    """Tokens whose signatures lie together. Where two or more places are claimed twice, the group
    holds pictures that are much alike, and is taken apart more finely."""
    groups = []
    while len(left):
        centre = signature[left[0]]
        for _ in range(2):  # from one token to the middle of those around it
            near = (signature[left] - centre).norm(dim=1) < radius
            centre = signature[left[near]].median(0).values
        near[0] = True  # whatever the middle has become, this one is done with
        mine, left = left[near], left[~near]
        twice = len(mine) - len(place[mine].unique())
        if twice > 1 and radius > _FINEST:
            groups += _groups(mine, signature, place, radius / 4)
        else:
            groups.append(mine)
    return groups


def _undisputed(mine: Tensor, tokens: Tokens) -> list[int]:
    """For every place, the token with most votes."""
    claims: dict[int, list[int]] = {}
    for index in mine.tolist():
        claims.setdefault(int(tokens.place[index]), []).append(index)
    best = []
    for rivals in claims.values():
        rivals.sort(key=lambda i: -int(tokens.votes[i]))
        if len(rivals) == 1 or tokens.votes[rivals[0]] > tokens.votes[rivals[1]]:
            best.append(rivals[0])
    return best


def merge(pictures: Sequence[Picture], others: Sequence[Picture]) -> int:
    """Give ``pictures`` the patches that ``others`` of them hold, and return how many.

    Two are one picture where what both show is the same, at three places or more; signatures are
    not compared, because the constants of another round shift them.
    """
    gained = 0
    for picture in pictures:
        for other in others:
            both = picture.patches.keys() & other.patches.keys()
            if len(both) < _FEWEST:
                continue
            apart = [picture.patches[at] - other.patches[at] for at in both]
            if not all(float(d.square().mean().sqrt()) < _AGREE for d in apart):
                continue
            new = {at: p for at, p in other.patches.items() if at not in picture.patches}
            picture.patches.update(new)
            gained += len(new)
    return gained


def filled(image: Tensor, known: Tensor) -> Tensor:
    """``image`` (3, H, W) with the pixels that are not ``known`` (H, W) as smooth as what surrounds
    them allows: each becomes the mean of its four neighbours."""
    if bool(known.all()):
        return image
    fill = (
        image[:, known].mean(1, keepdim=True) if bool(known.any()) else image.new_full((3, 1), 0.5)
    )
    out = torch.where(known, image, fill[:, :, None])
    for _ in range(_SWEEPS):
        framed = nn.functional.pad(out[None], (1, 1, 1, 1), mode="replicate")[0]
        around = framed[:, :-2, 1:-1] + framed[:, 2:, 1:-1]
        around = around + framed[:, 1:-1, :-2] + framed[:, 1:-1, 2:]
        out = torch.where(known, image, around / 4)
    return out


def _missing(pictures: Sequence[Picture], parts: VitParts) -> float:
    """The share of patches that were not read, of the pictures that showed."""
    return 1 - sum(len(p.patches) for p in pictures) / (len(pictures) * parts.tokens)


def _pooled_first(model: nn.Module) -> bool:
    """Whether the gradient of a picture's tokens is one: it is, where they are pooled unnormed."""
    return getattr(model, "global_pool", "") == "avg" and not isinstance(
        getattr(model, "norm", None), nn.LayerNorm
    )


def _most_pictures(view: View) -> int:
    """How many pictures there can be: a batch, or one for every local step where those are told."""
    if view.update.kind is Upload.GRADIENT or not view.grants("local_steps"):
        return view.batch_size
    steps, epochs = view.local_steps
    if epochs:
        protocol = view.known_protocol()
        anew = protocol is not None and bool(protocol.augment)  # each epoch shows other views
        passes = 1 if anew else epochs
        return max(view.batch_size, samples_of_epoch(view.update.num_examples, passes))
    return view.batch_size * (steps or 1)


def _labels(
    view: View, model: nn.Module, pictures: Sequence[Picture], notes: list[str]
) -> Tensor | None:
    """The label of each picture: which ones there are is read from the head's bias, whose is which
    from the weights of the pictures in the update, which the head made to differ by class."""
    try:
        labels = recover_labels(view.update, model, _most_pictures(view))
    except AttackError as error:
        notes.append(f"no labels: {error}")
        return None
    if len(labels.unique()) == 1:
        return labels[: len(pictures)]
    if len(pictures) < len(labels) or view.update.kind is not Upload.GRADIENT:
        notes.append("no labels: whose is which shows in one gradient, when all pictures do")
        return None
    column = view.weights[head_names(model)[0]].double()
    level = column[:, column.abs().sum(0).argmax()]
    pull = level.mean() - level[labels]  # a picture's weight is in proportion: mean p s - s_c
    order = torch.tensor([picture.weight for picture in pictures]).argsort()
    result = torch.empty_like(labels)
    result[order] = labels[pull.argsort()]
    return result

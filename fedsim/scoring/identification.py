"""Identification: is a reconstruction closer to the client's picture than to any other?

The image identifiability precision of GradInversion (section 4.3) and GradViT (appendix A): the
nearest neighbour of a reconstruction, in the features of a network of natural images, among the
true picture and a gallery of others from the same data set. How often that happens by chance is
told by `fedsim.scoring.lineup`.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedsim.clients import images_of, undealt
from fedsim.clients.data import ImageSet, pixel_digest
from fedsim.core.cache import cache_folder
from fedsim.core.errors import DamagedError, ModelError
from fedsim.core.files import read_tensors, save_tensors
from fedsim.core.knowledge import PriorModel
from fedsim.core.prior_networks import load_prior
from fedsim.core.spec import DataSpec, PriorSpec, Spec

SMALL, LARGE = 64, 96  # pixels per side that the network sees, of pictures up to 64 and above
CHUNK = 32
GALLERY_SEED = 23
FEWEST = 10  # pictures; a choice among fewer says nothing
PIXELS = "pixels"


class FeatureSpace:
    """Where neighbours are looked for: the prior network's features, or pixels without one."""

    def __init__(self, prior: PriorModel | None):
        self.prior = prior
        self.name = prior.name if prior is not None else PIXELS

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Unit vectors (B, D) of pictures (B, 3, H, W) in [0, 1]."""
        return torch.cat([F.normalize(self._features(c), dim=1) for c in images.split(CHUNK)])

    def _features(self, images: Tensor) -> Tensor:
        if self.prior is None:
            return images.flatten(1) - images.flatten(1).mean(1, keepdim=True)
        side = SMALL if images.shape[-1] <= SMALL else LARGE
        if images.shape[-1] != side:
            images = F.interpolate(images, (side, side), mode="bilinear", antialias=True)
        mean, std = (torch.tensor(c).view(1, 3, 1, 1) for c in (self.prior.mean, self.prior.std))
        network = self.prior.model
        maps: Tensor = network.forward_features((images - mean) / std)  # type: ignore[operator]
        return maps.mean((2, 3))


@dataclass(frozen=True)
class Wanted:
    """A victim's own pictures, as a gallery sees them."""

    features: Tensor  # (B, D)
    own: Tensor  # (G,): which of the gallery are among them


@dataclass(frozen=True)
class Gallery:
    """Candidates other than the victim's own pictures."""

    space: FeatureSpace
    features: Tensor  # (G, D), unit vectors
    digests: tuple[str, ...]  # of their pixels: the victim's own pictures must not be among them
    rows: tuple[int, ...] = ()  # where they are in the data set

    def __len__(self) -> int:
        return len(self.digests)

    def wanted(self, truth: Tensor) -> Wanted:
        """The pictures to be told from the gallery; computed once for all attacks on a victim."""
        known = {pixel_digest(picture) for picture in truth}
        own = torch.tensor([digest in known for digest in self.digests], dtype=torch.bool)
        return Wanted(self.space(truth), own)

    def identified(self, wanted: Wanted, guess: Tensor) -> list[int]:
        """For each reconstruction, 1 where its own picture is the nearest candidate, else 0."""
        features = self.space(guess)
        others = (features @ self.features.T).masked_fill(wanted.own, -2.0)
        hits = (features * wanted.features).sum(1) > others.max(1).values
        return [int(hit) for hit in hits]


@dataclass(frozen=True)
class Identification:
    """The gallery of a run, or why there is none."""

    gallery: Gallery | None
    reason: str | None = None


def identification_of(spec: Spec) -> Identification:
    """The gallery that a spec asks for."""
    if spec.audit.gallery == 0:
        return Identification(None, "identification is switched off (audit.gallery is 0)")
    images = images_of(spec.data, "train")
    if len(images) < FEWEST:
        return Identification(
            None, f"identification needs a gallery, and the data set has {len(images)} pictures"
        )
    return Identification(_gallery(undealt(spec.data), spec.audit.gallery, spec.audit.features))


@functools.lru_cache(maxsize=4)
def _gallery(data: DataSpec, wanted: int, features: str) -> Gallery:
    """A gallery is the same for every seed and partition: rates can be compared between runs."""
    images = images_of(data, "train")
    coin = np.random.default_rng(GALLERY_SEED)
    chosen = sorted(coin.permutation(len(images))[:wanted].tolist())
    space = feature_space(features)
    digests = tuple(pixel_digest(images.image(index)) for index in chosen)
    return Gallery(space, _features(space, images, chosen, digests), digests, tuple(chosen))


def feature_space(wanted: str = "prior") -> FeatureSpace:
    """That of the packaged prior network; pixels where they are wanted or it is not installed."""
    if wanted == PIXELS:
        return FeatureSpace(None)
    try:
        return FeatureSpace(load_prior(PriorSpec()))
    except ModelError:
        return FeatureSpace(None)


def _features(
    space: FeatureSpace, images: ImageSet, chosen: list[int], digests: tuple[str, ...]
) -> Tensor:
    """The features of a gallery, cached between runs by the pixels they were computed from."""
    key = hashlib.sha256(f"{space.name} {SMALL} {LARGE} {' '.join(digests)}".encode()).hexdigest()[
        :32
    ]
    cache = cache_folder() / f"gallery-{key}.safetensors"
    cached = _recalled(cache)
    if cached is not None and len(cached) == len(chosen):
        return cached
    features = torch.cat([space(chunk) for chunk in _chunks(images, chosen)])
    try:
        save_tensors(cache, {"features": features})
    except OSError:  # a cache that cannot be written costs time, nothing else
        cache.unlink(missing_ok=True)
    return features


def _recalled(cache: Path) -> Tensor | None:
    try:
        return read_tensors(cache)[0].get("features")
    except (FileNotFoundError, DamagedError):  # not there, or spoilt: computed again
        return None


def _chunks(images: ImageSet, chosen: list[int]) -> Iterator[Tensor]:
    for at in range(0, len(chosen), CHUNK):
        yield torch.stack([images.image(index) for index in chosen[at : at + CHUNK]])

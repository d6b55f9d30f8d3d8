"""Rehearsal: a made-up picture through the client's own code, to see what arithmetic leaves.

Whether equations determine a picture is a matter of shapes. Whether 32-bit numbers, the local
steps and the defenses leave enough of them is not: so one made-up picture after the other goes
through fresh weights, the defenses and the closed forms. No data is read and no round is run.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from attacks import create_attack
from attacks.labels import recover_labels
from fedsim.core.attack import no_progress
from fedsim.core.defense import Defense
from fedsim.core.errors import FedsimError
from fedsim.core.knowledge import THREATS, View
from fedsim.core.learning import Protocol, Update, local_update
from fedsim.core.observation import Observation, Public
from fedsim.core.spec import Spec
from fedsim.jobs import countered

CLOSED_FORMS = ("patch_solve", "row_space")
DRAWS, CHANCES, LARGE_DRAWS = 4, 12, 2  # pictures: usually; where a defense tosses a coin; else
LARGE = 2e9  # parameters times pixels: from here on, fewer pictures
MOST_LABELS = 8  # pictures in a batch whose labels are read
WHITE_NOISE = 1e-16  # the least mean squared error that counts, as in the scores


@dataclass(frozen=True)
class Rehearsal:
    """What came back. ``psnr``: of each closed form, each picture; ``bare``: the better of the
    two without what defenses do to batches, gradients and updates."""

    psnr: dict[str, list[float]] = field(default_factory=dict)
    bare: list[float] = field(default_factory=list)
    labels: float | None = None  # share of batches whose labels were read without a mistake
    batch: int = 0  # pictures in a batch whose labels were read
    declined: str | None = None  # why there is none


def rehearse(
    spec: Spec,
    model: nn.Module,
    defenses: Sequence[Defense],
    *,
    classes: int,
    steps: int,
    pictures: bool,
    chance: bool,
) -> Rehearsal:
    """Rehearse ``steps`` steps on one picture where ``pictures``, and the reading of labels."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return Rehearsal(declined="the model is too large to be filled with numbers in time")
    stage = Stage(spec, model, defenses, classes)
    draws = CHANCES if chance else DRAWS
    if sum(p.numel() for p in model.parameters()) * spec.data.image_size**2 / 256 > LARGE:
        draws = LARGE_DRAWS
    batch = min(spec.train.batch_size, MOST_LABELS)
    try:
        right = [stage.reads_labels(draw, batch) for draw in range(draws)]
        psnr: dict[str, list[float]] = {name: [] for name in CLOSED_FORMS}
        bare: list[float] = []
        for draw in range(draws if pictures else 0):
            for name, value in stage.recovers(draw, steps).items():
                psnr[name].append(value)
        if pictures and defenses:
            plain = Stage(spec, model, (), classes)
            bare = [max(plain.recovers(draw, steps).values()) for draw in range(LARGE_DRAWS)]
    except (FedsimError, ValueError, RuntimeError) as error:
        # A model may not take a single picture (BatchNorm on 1 x 1) and a defense of somebody's
        # own may fail: the audit would tell, here it is one finding.
        return Rehearsal(declined=str(error).strip().splitlines()[0])
    share = None if None in right else sum(map(bool, right)) / len(right)
    return Rehearsal({n: v for n, v in psnr.items() if v}, bare, share, batch)


@dataclass(frozen=True)
class Stage:
    """Client and server of a rehearsal."""

    spec: Spec
    model: nn.Module
    defenses: Sequence[Defense]
    classes: int

    def recovers(self, draw: int, steps: int) -> dict[str, float]:
        """PSNR of each closed form on one picture; 0 where it declines."""
        picture, label = self._batch(draw, 1)
        observation = self._observed(draw, [(picture, label)] * steps)
        view = View(
            observation,
            THREATS["C"].grants,
            architecture=lambda: copy.deepcopy(self.model),
            counter=partial(countered, observation) if self.defenses else None,
        )
        found = {}
        for name in CLOSED_FORMS:
            try:
                result = create_attack(name).reconstruct(
                    view, device=torch.device("cpu"), progress=no_progress
                )
            except FedsimError:  # what it needs was not uploaded: no picture
                found[name] = 0.0
                continue
            error = (result.images.double() - picture.double()).square().mean()
            found[name] = float(-10 * torch.log10(error.clamp(min=WHITE_NOISE)))
        return found

    def reads_labels(self, draw: int, size: int) -> bool | None:
        """Whether the labels of one step are read without a mistake; None without a head."""
        batch = self._batch(draw, size)
        observation = self._observed(draw, [batch])
        protocol = observation.public.protocol
        try:
            found = recover_labels(observation.update, self.model, size, protocol=protocol)
        except FedsimError:
            return None
        return found.tolist() == batch[1].sort().values.tolist()

    def _observed(self, draw: int, batches: list[tuple[Tensor, Tensor]]) -> Observation:
        # The first round and the last, in turns: a defense may begin later.
        round_ = 1 if draw % 2 == 0 else self.spec.train.rounds
        cohort = self.spec.cohort(round_)
        active = [d.at_round(round_, cohort[0], cohort) for d in self.defenses]
        protocol = Protocol.of(self.spec.train, self.spec.data)
        update: Update = local_update(
            self.model,
            batches,
            protocol,
            defenses=active,
            rng=torch.Generator().manual_seed(1000 + draw),
            seed=draw,
        )
        public = Public.of(self.spec, self.classes)
        return Observation(round_, cohort[0], self.model.state_dict(), update, public)

    def _batch(self, draw: int, size: int) -> tuple[Tensor, Tensor]:
        coin = torch.Generator().manual_seed(draw)
        labels = torch.randint(self.classes, (size,), generator=coin)
        return made_up(size, self.spec.data.image_size, coin), labels


def made_up(count: int, side: int, coin: torch.Generator) -> Tensor:
    """Pictures (count, 3, side, side) of noise with the spectrum of photographs, in 8 bits."""
    noise = torch.randn(count, 4, side, side, generator=coin)
    rows, columns = torch.fft.fftfreq(side)[:, None], torch.fft.fftfreq(side)[None]
    far = (rows.square() + columns.square()).sqrt().clamp(min=1 / side)
    smooth = torch.fft.ifft2(torch.fft.fft2(noise) / far).real
    smooth = smooth / smooth.std((2, 3), keepdim=True)
    coloured = 0.5 + 0.2 * smooth[:, :1] + 0.07 * smooth[:, 1:]  # channels mostly agree
    return (coloured.clamp(0, 1) * 255).round() / 255

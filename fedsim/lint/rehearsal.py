"""Rehearsal: a made-up picture through the client's own code, to see what arithmetic leaves.

Whether equations determine a picture is a matter of shapes. Whether 32-bit numbers, the local steps
and the defenses leave enough of them is not: so one made-up picture after the other goes through
fresh weights, the defenses and the closed forms. No data is read and no round is run.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from fedsim.attacks import create_attack
from fedsim.attacks.labels import recover_labels
from fedsim.core.anatomy import head_names
from fedsim.core.attack import no_progress
from fedsim.core.defense import Defense
from fedsim.core.errors import AttackError, FedsimError, ModelError
from fedsim.core.knowledge import THREATS, Announced, View
from fedsim.core.learning import Protocol, local_update
from fedsim.core.metrics import decibel
from fedsim.core.observation import Observation, Public
from fedsim.core.spec import Spec, Upload
from fedsim.core.trainable import adapted_layers
from fedsim.defenses.applied import countered

EXACT_DB = 40.0  # a picture without a visible difference
DRAWS, CHANCES = 4, 12  # batches: usually; where a defense tosses a coin for each
LARGE, LARGE_DRAWS = 2e9, 2  # parameters times patches of 16 x 16 pixels: beyond, fewer draws
MOST_LABELS = 8  # pictures in a batch whose labels are read
CLIENTS, FIRST_ROUND = 4, 1000  # whose updates move adapters; the seeds of their pictures
BEGUN = 0.01  # the size of a head that began as zeros, after a step
CONTRAST = 0.35  # of made-up pictures: about an eighth of them is black or white


@dataclass(frozen=True)
class Rehearsal:
    """What came back. ``psnr``: of each picture, by the closed form ``form``; ``bare``: the same
    without what defenses do to batches, gradients and updates."""

    form: str | None = None
    psnr: tuple[float, ...] = ()
    bare: tuple[float, ...] = ()
    labels: float | None = None  # share of batches whose labels were read without a mistake
    batch: int = 0  # pictures in a batch whose labels were read
    declined: str | None = None  # why nothing was rehearsed

    @property
    def exact(self) -> bool:
        """Whether some picture came back without a visible difference."""
        return max(self.psnr, default=0.0) >= EXACT_DB


def rehearse(
    spec: Spec,
    model: nn.Module,
    defenses: Sequence[Defense],
    *,
    classes: int,
    steps: int,
    form: str | None,
    acting: bool,
    chance: bool,
) -> Rehearsal:
    """Rehearse the closed ``form`` on ``steps`` steps of one picture, and the reading of labels.

    ``acting``: a defense changes batches, gradients or updates, so both ways are compared;
    ``chance``: one tosses a coin for each batch, so more batches are tried.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return Rehearsal(form, declined="the model is too large to be filled with numbers in time")
    model = _begun(model) if spec.train.rounds > 1 else model
    draws, most = CHANCES if chance else DRAWS, MOST_LABELS
    if sum(p.numel() for p in model.parameters()) * spec.data.image_size**2 / 256 > LARGE:
        draws = most = LARGE_DRAWS
    stage, plain = Stage(spec, model, defenses, classes), Stage(spec, model, (), classes)
    batch = min(spec.train.step_size, most)
    right: list[bool | None] = []
    psnr: list[float] = []
    bare: list[float] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about slow paths, which do not matter here
            if adapted_layers(model) and spec.train.rounds > 1:
                stage = replace(stage, model=_a_round_later(stage, steps))
                plain = replace(plain, model=stage.model)
            for draw in range(draws):
                pictures, truth = stage.batch(draw, batch)
                observation = stage.observe(draw, [(pictures, truth)] * steps)
                right.append(stage.reads_labels(observation, truth))
                if form is not None:
                    psnr.append(stage.recovers(observation, pictures, form))
            for draw in range(LARGE_DRAWS if form is not None and acting else 0):
                assert form is not None
                pictures, truth = plain.batch(draw, batch)
                observation = plain.observe(draw, [(pictures, truth)] * steps)
                bare.append(plain.recovers(observation, pictures, form))
    except (FedsimError, ValueError, RuntimeError) as error:
        # A model may not take a single picture (BatchNorm on 1 x 1) and somebody's own defense may
        # fail: an audit would stop there, here it is one finding.
        reason = str(error).strip() or type(error).__name__
        return Rehearsal(form, declined=reason.splitlines()[0].rstrip("."))
    share = None if None in right else sum(map(bool, right)) / len(right)
    return Rehearsal(form, tuple(psnr), tuple(bare), share, batch)


def _begun(model: nn.Module) -> nn.Module:
    """The model, with numbers in a head of zeros: behind one, nothing has a gradient in the first
    round, and in every later one it has."""
    try:
        names = head_names(model)
    except ModelError:
        return model
    if bool(model.get_parameter(names[0]).any()):
        return model
    begun = copy.deepcopy(model)
    coin = torch.Generator().manual_seed(0)
    with torch.no_grad():
        head = begun.get_parameter(names[0])
        head.copy_(BEGUN * torch.randn(head.shape, generator=coin))
    return begun


def _a_round_later(stage: Stage, steps: int) -> nn.Module:
    """The model after the first round of a few clients with made-up pictures: how far it moves
    adapters from their zeros is what later gradients of theirs are read by."""
    clients = min(stage.spec.cohort_size, CLIENTS)
    moved, train = copy.deepcopy(stage.model), stage.spec.train
    step = -train.lr if train.upload is Upload.GRADIENT else 1.0
    batch = min(train.step_size, MOST_LABELS)
    for client in range(clients):
        drawn = stage.batch(FIRST_ROUND + client, batch)
        update = stage.observe(0, [drawn] * steps).update.widened()
        with torch.no_grad():
            for name, tensor in update.tensors.items():
                moved.get_parameter(name).add_(tensor, alpha=step / clients)
    return moved


@dataclass(frozen=True)
class Stage:
    """Client and server of a rehearsal."""

    spec: Spec
    model: nn.Module
    defenses: Sequence[Defense]
    classes: int

    def batch(self, draw: int, size: int) -> tuple[Tensor, Tensor]:
        coin = torch.Generator().manual_seed(draw)
        labels = torch.randint(self.classes, (size,), generator=coin)
        return made_up(size, self.spec.data.image_size, coin), labels

    def observe(self, draw: int, batches: list[tuple[Tensor, Tensor]]) -> Observation:
        # The first round and the last, in turns: a defense may begin later.
        round_ = 1 if draw % 2 == 0 else self.spec.train.rounds
        cohort = self.spec.cohort(round_)
        update = local_update(
            self.model,
            batches,
            Protocol.of(self.spec.train, self.spec.data),
            defenses=[d.at_round(round_, cohort[0], cohort) for d in self.defenses],
            rng=torch.Generator().manual_seed(1000 + draw),
            seed=draw,
        )
        public = Public.of(self.spec, self.classes)
        return Observation(round_, cohort[0], self.model.state_dict(), update, public)

    def recovers(self, observation: Observation, truth: Tensor, form: str) -> float:
        """PSNR of a closed form; 0 where it declines."""
        view = View(
            observation,
            THREATS["C"].grants,
            Announced(
                partial(copy.deepcopy, self.model),
                partial(countered, observation.update, observation.public.defenses)
                if self.defenses
                else None,
            ),
        )
        try:
            result = create_attack(form).reconstruct(
                view, device=torch.device("cpu"), progress=no_progress
            )
        except AttackError:  # what it needs was not uploaded, or is not finite: no picture
            return 0.0
        return float(decibel((result.images.double() - truth.double()).square().mean()))

    def reads_labels(self, observation: Observation, truth: Tensor) -> bool | None:
        """Whether the labels of one step are read without a mistake; None without a head."""
        protocol = observation.public.protocol
        try:
            seen = observation.update.widened()
            labels = recover_labels(seen, self.model, len(truth), protocol=protocol)
        except AttackError:
            return None
        return labels.tolist() == truth.sort().values.tolist()


def made_up(count: int, side: int, coin: torch.Generator) -> Tensor:
    """Pictures (count, 3, side, side) in 8 bits: smooth noise with blown-out areas, in which closed
    forms have as hard a time as with photographs. Channels mostly agree."""
    noise = torch.randn(count, 4, side, side, generator=coin)
    rows, columns = torch.fft.fftfreq(side)[:, None], torch.fft.fftfreq(side)[None]
    far = (rows.square() + columns.square()).clamp(min=side**-2)
    smooth = torch.fft.ifft2(torch.fft.fft2(noise) / far).real
    smooth = CONTRAST * smooth / smooth.std((2, 3), keepdim=True)
    coloured = 0.5 + smooth[:, :1] + 0.3 * smooth[:, 1:]
    return (coloured.clamp(0, 1) * 255).round() / 255

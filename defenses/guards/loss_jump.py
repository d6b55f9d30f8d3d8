"""LossJump: is the received model worse on the client's own pictures than it could honestly be?

A model that fishes a picture is confidently wrong about it, and one whose head was emptied knows
nothing any more. Losses rise in honest federations too, above all on skewed shards and in small
batches, so the guard speaks up late: it is the cheapest of all, and the least sharp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedsim.core.guard import Finding, Guard, Scene
from fedsim.defenses.guards import calibration

Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True)
class LossJump(Guard):
    """The score is a share of the limit that holds, so its limit is 1.

    ``fresh``: in the first round, how many times the loss of guessing (the logarithm of the number
    of classes) the loss on the first batch may be. ``jump``: later, by how many times the loss of
    guessing it may have risen since the last round that the client took part in, or above guessing
    where it took part in none.
    """

    fresh: Positive = calibration.FRESH_LOSS
    jump: Positive = calibration.LOSS_JUMP

    def inspect(self, scene: Scene) -> Finding:
        loss, classes = loss_of(scene)
        chance = math.log(max(2, classes))
        words = f"the loss is {loss:.3g}, that of guessing {chance:.3g}"
        if scene.round <= 1:
            share = loss / (self.fresh * chance)
        else:  # a model that is met late may have been trained to anything
            before = chance
            if "loss_jump/last" in scene.kept:
                before = float(scene.kept["loss_jump/last"])
                words += f", and it was {before:.3g} in the last round"
            share = max(0.0, loss - before) / (self.jump * chance)
        return Finding("loss_jump", share if math.isfinite(loss) else math.inf, 1.0, words)

    def keep(self, scene: Scene) -> dict[str, Tensor]:
        loss, _ = loss_of(scene)
        return {"loss_jump/last": torch.tensor(loss)}


@torch.no_grad()
def loss_of(scene: Scene) -> tuple[float, int]:
    """The loss on the first batch in the mode in which the client trains, and how many classes
    there are. Running statistics stay as they were: the model runs on a copy of them."""
    images, labels = scene.batches[0]
    buffers = {name: buffer.clone() for name, buffer in scene.model.named_buffers()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of dropout
        logits = functional_call(scene.model, buffers, (scene.protocol.normalise(images),))
    return float(F.cross_entropy(logits, labels)), logits.shape[1]

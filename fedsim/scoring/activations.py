"""Activations: the features that an attack claims beside those that the head truly read.

Compared are cosines: the scale of features is lost where the head has no bias. What is had for
nothing is the features of a grey picture, which anybody computes who has the weights; features of
an untrained network are alike for all pictures, so that a cosine means nothing without it.
"""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.anatomy import head_names
from fedsim.core.errors import ModelError
from fedsim.core.learning import Protocol
from fedsim.core.observation import Observation
from fedsim.core.vault import Truth
from fedsim.defenses.applied import announced

_AT_ONCE = 64  # pictures that go through the model together, where they do not mind each other


def features_beside(
    observation: Observation, truth: Truth, claimed: Tensor
) -> tuple[list[float | None], list[float | None]]:
    """For each true picture the cosine of the claimed features that are its partner, None where
    none is left for it, and that of a grey picture's; (B,) each."""
    count = len(truth.images)
    none: list[float | None] = [None] * count
    model = announced(observation.public)
    model.load_state_dict(observation.weights)
    protocol = observation.public.protocol
    grey = torch.full_like(truth.images[:1], 0.5)
    try:
        free = features_of(model.eval(), protocol.normalise(grey))
        true = _read(model.train(protocol.mode == "train"), truth, protocol)
    except ModelError:
        return none, none
    if claimed.shape[1] != true.shape[1]:
        return none, none
    cosines = F.cosine_similarity(true[:, None].double(), claimed[None].double(), dim=2)
    partners = linear_sum_assignment(cosines.numpy(), maximize=True)
    found = list(none)
    for row, column in zip(*(side.tolist() for side in partners), strict=True):
        found[row] = float(cosines[row, column])
    return found, F.cosine_similarity(true.double(), free.double(), dim=1).tolist()


def _read(model: nn.Module, truth: Truth, protocol: Protocol) -> Tensor:
    """What the head read of every picture, in the first batch that it was in: BatchNorm makes of a
    picture what the others of its batch are."""
    rows: dict[int, Tensor] = {}
    for batch in truth.batches:
        if set(batch) <= rows.keys():
            continue
        seen = features_of(model, protocol.normalise(truth.images[batch]), protocol.micro)
        rows = dict(zip(batch, seen, strict=True)) | rows
    if len(rows) < len(truth.images):
        raise ModelError("not every picture is in a batch.")
    return torch.stack([rows[at] for at in range(len(truth.images))])


def features_of(model: nn.Module, images: Tensor, at_once: int | None = None) -> Tensor:
    """What the head reads of normalised pictures, (B, D)."""
    seen: list[Tensor] = []
    head = model.get_submodule(head_names(model)[0].rpartition(".")[0])
    handle = head.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    size = at_once or (len(images) if model.training else _AT_ONCE)
    try:
        with torch.no_grad():
            for some in images.split(size):
                model(some)
    finally:
        handle.remove()
    whole = torch.cat(seen) if seen else torch.zeros(0)
    if whole.ndim != 2 or len(whole) != len(images):
        raise ModelError("the head reads more than one row of features for each picture.")
    return whole

"""Reading: what the head's update says after a manoeuvre, in the units of one mean gradient.

The head's bias gets mean_i (p_i - y_i), so it counts pictures; where the head was not uploaded, the
bias of the LayerNorm before it gets what the head sends back, W^T mean_i (p_i - y_i).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedsim.attacks.labels import recover_labels
from fedsim.attacks.pulls import momentum_pull, step_pulls
from fedsim.core.anatomy import head_names
from fedsim.core.epochs import epoch_rows, steps_of_round
from fedsim.core.errors import AttackError
from fedsim.core.learning import Update
from fedsim.core.manoeuvre import Brief, Sighting
from fedsim.core.observation import Observation, Public
from fedsim.core.spec import Upload

_APART = 0.2  # of a picture: what counts may be off by
_NONE = 0.01  # pictures: below is rounding, where each picture counts as a whole one
_KEEP_SIZE = (
    *("secure_aggregation", "frozen_pe", "sinusoidal_pe", "withheld", "label_disguise"),
    *("fedsim.defenses.secure_aggregation:SecureAggregation",),
)
_ALONG = 0.999  # cosine from which on a bias got nothing but what the head sent back


@dataclass(frozen=True)
class HeadReading:
    """The classifier's mean gradient over all pictures, in float64; of ``known`` size or not."""

    weight: Tensor  # (C, D)
    bias: Tensor  # (C,)
    known: bool = True


def read_head(seen: Sighting, model: nn.Module) -> HeadReading | None:
    """The head's part of an update; None where it was not uploaded, or not whole.

    A delta of plain SGD is divided by what a constant gradient would have moved it by; what a
    client clipped, or took AdamW's steps with, has a size that nobody knows.
    """
    names, tensors = head_names(model), seen.update.tensors
    if len(names) < 2 or not all(name in tensors for name in names):
        return None
    weight, bias = (tensors[name].detach().double().cpu() for name in names)
    if not bool(torch.isfinite(weight).all() and torch.isfinite(bias).all()):
        return None
    factor = gradient_scale(seen)
    if factor is None:
        sign = seen.update.kind.sign
        return HeadReading(sign * weight, sign * bias, known=False)
    return HeadReading(factor * weight, factor * bias)


def gradient_scale(seen: Sighting) -> float | None:
    """What turns an update into the mean gradient of its pictures; None where nobody knows it."""
    protocol, public = seen.public.protocol, seen.public
    if protocol.clip is not None or changes_size(public):
        return None
    if seen.update.kind is Upload.GRADIENT:
        return 1.0
    if protocol.optimizer != "sgd":
        return None
    samples = max(1, seen.pictures // clients_behind(seen))
    steps = steps_of_round(public.local_steps, public.local_epochs, samples, public.batch_size)
    return -seen.diluted / (protocol.lr * momentum_pull(protocol, steps))


def answer_weights(seen: Sighting) -> tuple[float, float]:
    """The least and the largest that one picture counts for, where a count is taken as if every
    step and batch were alike: with momentum an early step moves further than a late one, and in the
    last batch of an epoch, which may be smaller, a picture weighs more."""
    protocol, public = seen.public.protocol, seen.public
    if seen.update.kind is Upload.GRADIENT or protocol.optimizer != "sgd":
        return 1.0, 1.0
    samples = max(1, seen.pictures // clients_behind(seen))
    size, epochs = public.batch_size, public.local_epochs or 1
    steps = steps_of_round(public.local_steps, public.local_epochs, samples, size)
    sizes = [size] * steps
    if public.local_epochs:
        sizes = [len(rows) for rows in epoch_rows(samples, size)] * epochs
    whole = momentum_pull(protocol, steps)
    pulls = step_pulls(protocol, steps)
    weights = [
        epochs * samples * pull / (own * whole) for pull, own in zip(pulls, sizes, strict=True)
    ]
    return min(weights), max(weights)


def answers(count: float, weights: tuple[float, float]) -> tuple[int, int]:
    """The least and the largest number of answers that a count can stand for; the least is above
    the largest where it stands for none."""
    least, largest = weights
    fewest = max(0, math.ceil(count / largest - _APART))
    return fewest, max(0, math.floor(count / least + _APART))


def changes_size(public: Public, harmless: Sequence[str] = _KEEP_SIZE) -> bool:
    """Whether a declared defense may change the size of an upload, or put something beside it: all
    may but those that are known not to."""
    return any(str(defense.get("name")) not in harmless for defense in public.defenses)


def sent_back(seen: Sighting, model: nn.Module, row: Tensor) -> float | None:
    """How many pictures sent ``row`` (D,) back into the network, by the LayerNorm before the head;
    None where there is no such layer, or where more than that row arrived there."""
    factor = gradient_scale(seen)
    norms = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.LayerNorm)]
    if factor is None or not norms:
        return None
    gradient = seen.update.tensors.get(f"{norms[-1][0]}.bias")
    if gradient is None or gradient.shape != row.shape:
        return None
    gradient, row = factor * gradient.detach().double().cpu(), row.double()
    size = float(gradient.norm() * row.norm())
    along = float(gradient @ row)
    if size > 0 and abs(along) < _ALONG * size:
        return None
    return -seen.pictures * along / float(row.square().sum())


def count_others(seen: Sighting, head: HeadReading, target: int) -> int:
    """How many pictures of other classes than the target's there are, by their bias."""
    counts = (-seen.pictures * head.bias).round().clamp(min=0)
    return int(counts.sum() - counts[target])


def count_unpredicted(seen: Sighting, head: HeadReading, target: int) -> float | None:
    """How many pictures of a class answered that is never predicted: B sum of the others' bias,
    since p - y sums to zero; the target's own bias is too large to show a step.

    Of a clipped gradient the size is not known. An absent class has 1 / (C - 1), and no class has
    more: by the largest a count may come out too high, and never too low.
    """
    others = torch.arange(len(head.bias)) != target
    total = float(head.bias[others].sum())
    if not head.known:
        largest = float(head.bias[others].max()) * (len(head.bias) - 1)
        if seen.update.kind is not Upload.GRADIENT or largest <= 0:
            return None
        if changes_size(seen.public, (*_KEEP_SIZE, "clipping")):
            return None  # noise, or gaps: what is largest says nothing
        total /= largest
    count = seen.pictures * total
    if abs(count) < _NONE:
        return 0.0
    return count if head.known or count > 0 else None


def labels_behind(seen: Sighting, model: nn.Module, gated: int | None = None) -> list[int] | None:
    """The labels behind a reply, where they can be read. Behind a gate before class ``gated`` that
    class is predicted for nearly every picture: it has those that no other class accounts for."""
    head = read_head(seen, model)
    if head is None:
        return None
    if gated is not None and head.known:
        counts = (-seen.pictures * head.bias).round().long().clamp(min=0)
        counts[gated] = 0
        counts[gated] = max(0, seen.pictures - int(counts.sum()))
        return torch.repeat_interleave(torch.arange(len(counts)), counts).tolist()
    public = seen.public
    steps = public.local_steps or 1
    try:
        found = recover_labels(
            seen.update, model, seen.pictures, protocol=public.protocol, steps=steps
        )
    except AttackError:
        return None
    return [int(label) for label in found]


def without_head(update: Update, model: nn.Module) -> Update:
    """An update without the tensors that every picture reaches."""
    names = head_names(model)
    tensors = {name: tensor for name, tensor in update.tensors.items() if name not in names}
    return replace(update, tensors=tensors)


def with_lone_head(
    update: Update, seen: Sighting, model: nn.Module, head: HeadReading, target: int
) -> Update:
    """The gradient of the one picture that remains, with the head's part that it alone would have.

    What others sent to the head is in the update, but its features f are read clean from the rows
    that they do not reach: dW_c = (p_c - 1) f and db_c = p_c - 1 for a class that nobody else has
    and nobody is predicted as. The rest is what the model says to f.
    """
    if update.kind is not Upload.GRADIENT or not head.known:
        return update
    others = torch.arange(len(head.bias)) != target
    alone = "gate" in seen.about  # then all pictures are of the class, and one is left of them
    weight, bias = (
        (head.weight[others].sum(0), head.bias[others].sum())
        if alone
        else (
            head.weight[target],
            head.bias[target],
        )
    )
    if not float(bias.abs()) > 0:
        return update
    features = weight / bias
    names = head_names(model)
    sent = [seen.weights[name].detach().double().cpu() for name in names]
    error = (sent[0] @ features + sent[1]).softmax(0)
    error[target] -= 1
    own = dict(zip(names, (torch.outer(error, features), error), strict=True))
    tensors = {n: own[n].float() if n in own else update.tensors[n] for n in seen.update.tensors}
    return replace(update, tensors=tensors)


def scaled(update: Update, factor: float, pictures: int) -> Update:
    """A gradient times ``factor``, as that of so many pictures. A delta stays as it is: its size
    says nothing, and weight decay is taken out of it by its own."""
    if update.kind is not Upload.GRADIENT:
        return update
    tensors = {name: factor * tensor for name, tensor in update.tensors.items()}
    return replace(update, tensors=tensors, num_examples=max(1, pictures))


def is_silent(tensors: Mapping[str, Tensor]) -> bool:
    """Whether nothing at all arrived."""
    return not any(bool((tensor != 0).any()) for tensor in tensors.values())


def only_sums(public: Public) -> bool:
    """Whether the server reads the sums of cohorts alone, by the defenses that are declared."""
    return any(
        str(defense.get("name", "")).lower().replace("_", "").endswith("secureaggregation")
        for defense in public.defenses
    )


def clients_behind(seen: Sighting) -> int:
    """How many clients' pictures an update is the mean of."""
    if seen.stayed:
        return len(seen.stayed)
    if seen.public.local_epochs:  # how many pictures a client has is then its own affair
        return int(seen.about.get("cohort", 1)) if only_sums(seen.public) else 1
    alone = Observation(seen.round, seen.client, {}, seen.update, seen.public).pictures
    return max(1, round(seen.pictures / alone))


def group_of(client: int, public: Public) -> str:
    """Whose reply it is that is remembered: a client's, or any cohort's where only sums arrive."""
    return "cohort" if only_sums(public) else str(client)


def pictures_expected(brief: Brief) -> int:
    """How many pictures will stand behind one reply, as far as the protocol tells."""
    public = brief.public
    alone = public.batch_size
    if public.protocol.upload is Upload.DELTA:
        alone *= public.local_steps or 1
    return alone * (len(brief.cohort) if only_sums(public) else 1)

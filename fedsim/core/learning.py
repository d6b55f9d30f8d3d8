"""Learning: how a client's batches become an update.

Clients train by `learn`; the canary and the linter replay a client by the same code. So the true
batch, replayed, must give the update that was observed.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, assert_never

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.core.anatomy import batchnorm_names
from fedsim.core.defense import Defense
from fedsim.core.errors import FedsimError
from fedsim.core.lora import Lora, Trainable
from fedsim.core.losses import Loss
from fedsim.core.optimizers import Betas, OptimizerName, Schedule, create_optimizer
from fedsim.core.precision import Precision, autocast, gradients, stored, widened
from fedsim.core.spec import DataSpec, TrainSpec, Upload

# Images (B, 3, H, W) in [0, 1]; labels (B,), or (B, C) where each is a mixture of classes.
Batch = tuple[Tensor, Tensor]
Colour = tuple[float, float, float]


@dataclass(frozen=True)
class Protocol:
    """How a client learns in one round, as far as the update depends on it. ``micro``: the pictures
    of one backward pass, where a step accumulates several; ``augment``: what pictures go through
    before they are learned from, which happens before `learn`; ``trainable`` and ``lora``: which
    parameters are trained, which the model says when it is built (`fedsim.core.trainable`)."""

    upload: Upload = Upload.GRADIENT
    optimizer: OptimizerName = "sgd"
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    mode: Literal["train", "eval"] = "train"
    batchnorm: Literal["shared", "local"] = "shared"
    mean: Colour = (0.5, 0.5, 0.5)
    std: Colour = (0.5, 0.5, 0.5)
    betas: Betas = (0.9, 0.999)
    schedule: Schedule = field(default_factory=Schedule)
    proximal: float = 0.0
    micro: int | None = None
    loss: Loss = field(default_factory=Loss)
    augment: tuple[dict[str, Any], ...] = ()
    precision: Precision = "float32"
    upload_dtype: Precision = "float32"
    trainable: Trainable = "all"
    lora: Lora = field(default_factory=Lora)

    def __post_init__(self) -> None:
        object.__setattr__(self, "upload", Upload(self.upload))

    @classmethod
    def of(cls, train: TrainSpec, data: DataSpec, round_: int = 1) -> Protocol:
        return cls(
            upload=train.upload,
            optimizer=train.optimizer,
            lr=train.rate(round_),
            momentum=train.momentum,
            weight_decay=train.weight_decay,
            clip=train.clip,
            mode=train.mode,
            batchnorm=train.batchnorm,
            mean=data.mean,
            std=data.std,
            betas=train.betas,
            schedule=train.schedule,
            proximal=train.proximal,
            micro=train.batch_size if train.accumulate > 1 else None,
            loss=train.loss,
            augment=tuple(one.model_dump(mode="json") for one in train.augment),
            precision=train.precision,
            upload_dtype=train.upload_dtype,
            trainable=train.trainable,
            lora=train.lora,
        )

    def rates(self, steps: int) -> list[float]:
        """The learning rate of each local step."""
        return [self.lr * self.schedule.share(at, steps) for at in range(steps)]

    def normalise(self, images: Tensor) -> Tensor:
        """Images in [0, 1] as the model takes them."""
        return (images - _channels(self.mean, images)) / _channels(self.std, images)


def _channels(colour: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(colour, dtype=like.dtype, device=like.device).view(1, -1, 1, 1)


@dataclass(frozen=True)
class Update:
    """What a client uploads: a gradient or a weight delta by parameter name, BN buffers where the
    protocol shares them, and how many examples stand behind it. ``moved``: how far the client's
    training moved those buffers, and ``steps``: how many it took, for its defenses; they do not
    travel."""

    kind: Upload
    tensors: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    num_examples: int = 0
    loss: float = float("nan")
    moved: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", Upload(self.kind))

    def nbytes(self) -> int:
        groups = (self.tensors, self.buffers)
        return sum(t.numel() * t.element_size() for group in groups for t in group.values())

    def widened(self) -> Update:
        """The same in float32 where it was uploaded in half of it: what attacks compute with."""
        tensors = widened(self.tensors)
        same = all(tensors[name] is tensor for name, tensor in self.tensors.items())
        return self if same else replace(self, tensors=tensors)

    def is_finite(self) -> bool:
        # numpy: ten times faster than torch's two passes over many small tensors on a CPU
        return all(
            bool(np.isfinite(tensor.detach().cpu().float().numpy()).all())
            for group in (self.tensors, self.buffers)
            for tensor in group.values()
        )


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names and numbers: equal exactly when the payloads are."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        numbers = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        total.update(numbers.numpy().tobytes())  # as bytes: numpy has not every type
    return total.hexdigest()


@dataclass
class Trail:
    """What each defense changed, as digests of the payload before and after it, and what it keeps
    back for the next round."""

    entries: list[dict[str, str]] = field(default_factory=list)
    kept_back: dict[str, Tensor] = field(default_factory=dict)

    def note(
        self,
        defense: Defense,
        stage: str,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
    ) -> None:
        first, second = digest(before), digest(after)
        if first != second:
            name = type(defense).__name__
            self.entries.append({"defense": name, "stage": stage, "before": first, "after": second})


def local_update(
    model: nn.Module,
    batches: Iterable[Batch],
    protocol: Protocol,
    *,
    defenses: Sequence[Defense] = (),
    rng: torch.Generator | None = None,
    seed: int = 0,
    sent: Mapping[str, Tensor] = MappingProxyType({}),
) -> Update:
    """The update a client with these batches uploads. Pure: ``model`` is left as it was."""
    told: dict[str, Any] = {"defenses": defenses, "rng": rng, "seed": seed, "sent": sent}
    return learn(copy.deepcopy(model), batches, protocol, **told)


def learn(
    model: nn.Module,
    batches: Iterable[Batch],
    protocol: Protocol,
    *,
    defenses: Sequence[Defense] = (),
    rng: torch.Generator | None = None,
    seed: int = 0,
    trail: Trail | None = None,
    sent: Mapping[str, Tensor] = MappingProxyType({}),
) -> Update:
    """Train ``model`` in place, one step per batch, and return the update. The batches are as the
    model sees them, augmented already.

    ``rng`` is the client's secret, for its defenses; ``seed`` is that of the training itself, for
    dropout. A gradient upload takes exactly one batch. ``sent``: buffers as they came, where a
    model takes them up otherwise: averaged counters are no whole numbers.
    """
    rng = rng or torch.Generator().manual_seed(0)
    trail = trail or Trail()
    model.train(protocol.mode == "train")
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise FedsimError("nothing of the model is trained.")
    before = {n: p.detach().clone() for n, p in trained.items()}
    shared = protocol.batchnorm == "shared"
    held = {n: sent.get(n, b) for n, b in batchnorm_buffers(model).items()} if shared else {}
    optimizer, batches = _optimizer(trained, protocol), list(batches)
    rates = protocol.rates(len(batches))
    gradient: dict[str, Tensor] = {}
    examples, loss_sum = 0, 0.0

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for step, (images, labels) in enumerate(batches):
            if optimizer is None and step:
                raise FedsimError("a gradient upload is made of one batch, not of several.")
            drawn = len(labels)  # a defense may show the model more
            for defense in defenses:
                shown = (images, labels)
                images, labels = defense.protect_batch(images, labels, model, rng)
                if step == 0:
                    trail.note(defense, "batch", _payload(*shown), _payload(images, labels))
            for defense in defenses:
                defense.toss(model, rng)
            normalised = protocol.normalise(images)
            gradient, loss = _gradient(model, normalised, labels, trained, protocol, defenses)
            for defense in defenses:
                inside = defense.tossed(model)
                if step == 0 and inside is not None:
                    trail.note(defense, "network", *inside)
                other = defense.batch_gradient(model, normalised, labels, rng)
                if other is not None:
                    trail.note(defense, "gradient", gradient, other)
                    gradient = other
            _pull_back(gradient, trained, before, protocol.proximal)
            _clip(gradient, protocol.clip)
            for defense in defenses:
                protected = defense.protect_gradient(gradient, rng)
                if step == 0 and protected is not gradient:
                    trail.note(defense, "gradient", gradient, protected)
                gradient = protected
            examples += drawn
            loss_sum += loss * drawn
            if optimizer is not None:
                for name, parameter in trained.items():
                    parameter.grad = gradient.get(name)
                for group in optimizer.param_groups:
                    group["lr"] = rates[step]
                optimizer.step()
    if not examples:
        raise FedsimError("a client has no batch to learn from.")

    if optimizer is None:
        tensors = gradient
    else:
        tensors = {n: p.detach() - before[n] for n, p in trained.items()}
    buffers = batchnorm_buffers(model) if shared else {}
    moved = {n: buffer - held[n].to(buffer.device) for n, buffer in buffers.items()}
    about = (examples, loss_sum / examples, moved, len(batches))
    update = Update(protocol.upload, tensors, buffers, *about)
    for defense in defenses:
        protected_update = defense.protect_update(update, rng)
        if protected_update is not update:
            trail.note(defense, "update", update.tensors, protected_update.tensors)
            for name, tensor in defense.keep_back(update, protected_update).items():
                trail.kept_back[f"{kept_by(defense)}{name}"] = tensor.detach()
        update = protected_update
    tensors = {n: t.detach() for n, t in update.tensors.items()}
    return replace(update, tensors=stored(tensors, protocol.upload_dtype), moved={}, steps=1)


def kept_by(defense: Defense) -> str:
    """The prefix of what a defense keeps back, in a client's own state."""
    return f"kept back by {type(defense).__name__}: "


def recall(defenses: Iterable[Defense], state: Mapping[str, Tensor]) -> list[Defense]:
    """The defenses of a client that kept this state."""
    recalled = []
    for defense in defenses:
        prefix = kept_by(defense)
        kept_back = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
        recalled.append(defense.recall(kept_back))
    return recalled


def batchnorm_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Running statistics of every BatchNorm layer, by state-dict name."""
    buffers = {}
    for name in batchnorm_names(model):
        for key, value in model.get_submodule(name).named_buffers():
            buffers[f"{name}.{key}"] = value.detach().clone()
    return buffers


def _whole(loss: Tensor, model: nn.Module, defenses: Sequence[Defense]) -> Tensor:
    """The loss with what defenses add to it."""
    terms = [term for d in defenses if (term := d.penalty(model)) is not None]
    return torch.stack([loss, *terms]).sum() if terms else loss


def _payload(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"images": images, "labels": labels}


def _gradient(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    trained: Mapping[str, nn.Parameter],
    protocol: Protocol,
    defenses: Sequence[Defense],
) -> tuple[dict[str, Tensor], float]:
    """The gradient of one step (images normalised) and its loss: the mean over the batches that it
    accumulates, each with a backward pass of its own."""
    size, weights = protocol.micro or max(1, len(labels)), list(trained.values())
    parts = list(zip(images.split(size), labels.split(size), strict=True))
    total: dict[str, Tensor] = {}
    loss_sum = 0.0
    for some, classes in parts:
        with autocast(protocol.precision, some.device):
            logits = model(some)
        loss = protocol.loss(logits, classes)
        whole = _whole(loss, model, defenses)
        found = gradients(whole, weights, protocol.precision)
        for (name, parameter), gradient in zip(trained.items(), found, strict=True):
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            total[name] = total[name] + gradient if name in total else gradient
        loss_sum += float(loss.detach())
    if len(parts) > 1:
        total = {name: gradient / len(parts) for name, gradient in total.items()}
    return total, loss_sum / len(parts)


def _pull_back(
    gradient: dict[str, Tensor],
    trained: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    strength: float,
) -> None:
    """Add the gradient of  mu/2 ||w - w_global||^2, FedProx's term (Li et al. 2020, Eq. 2)."""
    if strength:
        for name, weight in trained.items():
            gradient[name] = gradient[name] + strength * (weight.detach() - before[name])


def _clip(gradient: dict[str, Tensor], limit: float | None) -> None:
    if limit is None:
        return
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g) for g in gradient.values()])
    )
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for tensor in gradient.values():
        tensor.mul_(scale)


def _optimizer(
    trained: Mapping[str, nn.Parameter], protocol: Protocol
) -> torch.optim.Optimizer | None:
    """What takes the local steps; None where a client uploads the gradient instead."""
    match protocol.upload:
        case Upload.GRADIENT:
            return None
        case Upload.DELTA:
            return create_optimizer(
                trained.values(),
                protocol.optimizer,
                lr=protocol.lr,
                momentum=protocol.momentum,
                betas=protocol.betas,
                weight_decay=protocol.weight_decay,
            )
        case other:
            assert_never(other)

"""Matchers: the matching loss of some images, and its derivative in them.

With v the derivative of the objective in the client's gradient, the derivative in the images is
that of <v, grad_theta L(x, theta)>, and there are two ways to it:

- ``double`` differentiates the gradient itself (create_graph): exact, and the reference.
- ``first_order`` uses that  d/dx <v, grad_theta L> = d/de grad_x L(x, theta + e v)  and takes the
  difference of two first-order passes, of which the second needs no gradient of the weights. It
  costs 5/3 of a plain training step in the limit, takes the memory of training, and can use
  fused attention. As a difference in float32 it needs full precision.

A matcher simulates one kind of client: `GradientMatcher` one gradient; `local_steps` has those of
clients that take several steps.
"""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from timm.layers import DropPath, PatchDropout
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.attacks.matching.objectives import Distance, Objective, Target
from fedsim.attacks.matching.priors import FeaturePrior
from fedsim.attacks.matching.smooth_modules import as_matrix, tape_kinks
from fedsim.core.anatomy import found_in
from fedsim.core.errors import AttackError
from fedsim.core.losses import Loss

Way = Literal["first_order", "double"]
Precision = Literal["float32", "bfloat16", "float16", "float64"]
STEP = 3e-4  # |e v|: small against the curvature, large against the rounding of float32
_BATCHED_ON_CPU = 1  # images per seed up to which a CPU searches seeds as one batch
AGREEMENT = 0.999  # least cosine between the two ways for `auto` to trust the faster one


@dataclass
class Match:
    """The matching loss (S,), and the derivatives of all that a matcher computes: of the loss and,
    where there is one, of a prior on features, whose value (S,) stands ``beside`` it."""

    value: Tensor
    images: Tensor  # (S, B, 3, H, W)
    labels: Tensor | None  # (S, B, C) where the labels are soft
    beside: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        """What the derivatives are of, (S,)."""
        return self.value if self.beside is None else self.value + self.beside.to(self.value)


def refuse_way(way: Way, precision: Precision) -> None:
    """Raise where numbers are too coarse for a way to the derivative."""
    if precision in ("bfloat16", "float16") and way == "first_order":
        raise AttackError(
            f"first_order is a difference in float32 and would be lost in {precision}; "
            f"use engine: double for mixed precision."
        )


@dataclass
class Matcher(ABC):
    """What all matchers share: the model without randomness, the layers to match, the way."""

    model: nn.Module
    target: Target
    objective: Objective
    way: Way = "first_order"
    precision: Precision = "float32"
    features: FeaturePrior | None = None
    compiled: bool = False
    step: float = STEP
    loss: Loss = field(default_factory=Loss)  # the client's, as far as it is known
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        dice = silence(self.model)
        if dice:
            self.notes.append(
                f"the client trains with dropout ({dice[0]}), whose coin only it knows: matched "
                f"without it"
            )
        as_matrix(self.model)
        if self.precision == "float64":
            self.model.double()
        refuse_way(self.way, self.precision)
        if self.compiled and self.way == "double":
            raise AttackError("compiled graphs have no second derivative; use engine: first_order.")
        if self.compiled and self.features is not None:
            raise AttackError("a prior on BatchNorm features listens to modules: not compiled.")
        parameters = dict(self.model.named_parameters())
        unknown = [name for name in self.target.names if name not in parameters]
        if unknown:
            raise AttackError(f"the update holds '{unknown[0]}', which the model does not have.")
        self.names = self._differentiated(parameters)
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in self.names)
        self.weights = [parameters[name] for name in self.names]

    def _differentiated(self, parameters: Mapping[str, nn.Parameter]) -> list[str]:
        """The layers whose gradients are needed: here those that are matched."""
        return self.target.names

    def __call__(self, images: Tensor, labels: Tensor) -> Match:
        """Match every seed: ``images`` (S, B, 3, H, W) normalised, ``labels`` (S, B) or logits
        (S, B, C)."""
        matches = [self._one(x, y) for x, y in zip(images, labels, strict=True)]
        soft = [match.labels for match in matches if match.labels is not None]
        beside = [match.beside for match in matches if match.beside is not None]
        return Match(
            torch.stack([match.value for match in matches]),
            torch.stack([match.images for match in matches]),
            torch.stack(soft) if soft else None,
            torch.stack(beside) if beside else None,
        )

    def state(self) -> dict[str, float]:
        """What changes from call to call, for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:  # noqa: B027
        """Go on from a checkpoint; there is nothing to restore where nothing changes."""

    def value(self, images: Tensor, labels: Tensor) -> Tensor:
        """The matching loss alone, (S,)."""
        return self(images, labels).value

    @abstractmethod
    def _one(self, images: Tensor, labels: Tensor) -> Match:
        """Match one seed."""

    def _leaves(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Images and labels as leaves of a new graph, and the list of what is searched."""
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        x = images.detach().to(dtype).requires_grad_(True)
        if not labels.is_floating_point():
            return x, labels, [x]
        y = labels.detach().to(dtype).requires_grad_(True)
        return x, y, [x, y]

    @contextlib.contextmanager
    def _casting(self) -> Iterator[None]:
        if self.precision in ("bfloat16", "float16"):
            device = self.weights[0].device.type
            with torch.autocast(device, dtype=getattr(torch, self.precision)):
                yield
        else:
            yield

    def _match(
        self,
        value: Tensor,
        derivatives: Sequence[Tensor],
        like: Tensor,
        penalty: Tensor | None = None,
    ) -> Match:
        soft = derivatives[1].to(like.dtype) if len(derivatives) > 1 else None
        beside = None if penalty is None else penalty.detach()
        return Match(value.detach(), derivatives[0].to(like.dtype), soft, beside)


class GradientMatcher(Matcher):
    """One gradient of one batch: what FedSGD uploads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.run: Any = torch.compile(self.model) if self.compiled else self.model
        self.probe: nn.Module | None = None
        if self.way == "first_order":
            self.probe = copy.deepcopy(self.model).requires_grad_(False)
            self.tape, self.probe_tape = tape_kinks(self.model), tape_kinks(self.probe)
            moved = dict(self.probe.named_parameters())
            self.moved = [moved[name] for name in self.target.names]
            self.run_probe: Any = torch.compile(self.probe) if self.compiled else self.probe
        # vmap cannot follow statistics that change in place, nor hooks, nor a tape.
        changing = any(isinstance(m, _BatchNorm) and m.training for m in self.model.modules())
        taped = self.way == "first_order" and self.tape.used
        plain = self.features is None and not changing and not taped and not self.compiled
        plain = plain and found_in(self.model) is None  # whose forward may do what vmap cannot
        self.batchable = self.way == "first_order" and plain

    def __call__(self, images: Tensor, labels: Tensor) -> Match:
        # On a CPU larger batches fill the cores by themselves.
        small = images.device.type == "cuda" or images.shape[1] <= _BATCHED_ON_CPU
        if len(images) > 1 and self.batchable and small:
            return self.batched(images, labels)
        return super().__call__(images, labels)

    def _one(self, images: Tensor, labels: Tensor) -> Match:
        if self.way == "double":
            return self._double(images, labels)
        with full_precision():
            return self._first_order(images, labels)

    def _double(self, images: Tensor, labels: Tensor) -> Match:
        x, y, searched = self._leaves(images, labels)
        with twice_differentiable(self.model), _listening(self.features, self.model):
            with self._casting():
                loss = classification_loss(self.run(x), y, self.loss)
            graph = torch.autograd.grad(loss, self.weights, create_graph=True, allow_unused=True)
            gradients = filled(graph, self.weights)
            with torch.no_grad():
                distance = self.objective([g.detach()[None] for g in gradients], self.target)
                v = distance.derivative(self.target)
            linked = [(g, w[0]) for g, w in zip(gradients, v, strict=True) if g.requires_grad]
            product = torch.stack([(g * w).sum() for g, w in linked]).sum()
            penalty = self.features.penalty() if self.features else None
            total = product if penalty is None else product + penalty
            derivatives = torch.autograd.grad(total, searched)
        return self._match(distance.value[0], derivatives, images, penalty)

    def _first_order(self, images: Tensor, labels: Tensor) -> Match:
        assert self.probe is not None
        x, y, searched = self._leaves(images, labels)
        self.tape.record()
        loss = classification_loss(self.run(x), y, self.loss)
        unshifted = torch.autograd.grad(loss, [*self.weights, *searched], allow_unused=True)
        gradients = filled(unshifted[: len(self.weights)], self.weights)
        with torch.no_grad():
            distance = self.objective([g[None] for g in gradients], self.target)
            e = (self.step / distance.norm.clamp(min=1e-30))[0]
            self._displace(distance, e)
        self.probe_tape.replay(self.tape.choices)
        with _listening(self.features, self.probe):
            loss = classification_loss(self.run_probe(x), y, self.loss)
            penalty = self.features.penalty() if self.features else None
            if penalty is not None:  # in the same pass: scaled by e, so that dividing restores it
                loss = loss + e * penalty
            shifted = torch.autograd.grad(loss, searched)
        with torch.no_grad():
            derivative = [
                (after - before) / e
                for after, before in zip(shifted, unshifted[len(self.weights) :], strict=True)
            ]
        return self._match(distance.value[0], derivative, images, penalty)

    def _displace(self, distance: Distance, e: Tensor) -> None:
        """Set the probe's weights to theta + e v, without building v."""
        own, towards = e * distance.own[:, 0], e * distance.towards[:, 0]
        # On a CPU numbers are faster than tensors of one number; on a GPU reading them would wait.
        factors: list[Any] = list(zip(own, towards, strict=True))
        scaled = e.device.type == "cpu"
        if scaled:
            factors = list(zip(own.tolist(), towards.tolist(), strict=True))
        for i, (a, b) in enumerate(factors):
            moved, weight, gradient = self.moved[i], self.weights[i], distance.gradients[i][0]
            wanted = self.target.tensors[i]
            if scaled:
                torch.add(weight, gradient, alpha=a, out=moved)
                moved.add_(wanted, alpha=b)
            else:
                torch.addcmul(weight, gradient, a, out=moved)
                moved.addcmul_(wanted, b)
            if distance.extra is not None:
                moved.addcmul_(distance.extra[i][0], e)

    def batched(self, images: Tensor, labels: Tensor) -> Match:
        """All seeds in one pass, by vmap over images, labels and their perturbed weights."""
        assert self.probe is not None
        soft, dtype = labels.is_floating_point(), self.weights[0].dtype
        like, images = images, images.to(dtype)
        labels = labels.to(dtype) if soft else labels
        fixed = {n: p.detach() for n, p in self.model.named_parameters()}
        fixed |= dict(self.model.named_buffers())

        def loss(weights: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
            state = fixed | dict(zip(self.target.names, weights, strict=True))
            return classification_loss(functional_call(self.model, state, (x,)), y, self.loss)

        searched = (1, 2) if soft else (1,)
        weights = [w.detach() for w in self.weights]
        with _plain_attention(self.model), full_precision():
            first = grad_and_value(loss, argnums=(0, *searched))
            (gradients, *before), _ = vmap(first, in_dims=(None, 0, 0))(weights, images, labels)
            with torch.no_grad():
                distance = self.objective(list(gradients), self.target)
                v = distance.derivative(self.target)
                e = self.step / distance.norm.clamp(min=1e-30)  # (S,)
                moved = [
                    torch.addcmul(w, d, e.view(-1, *[1] * w.dim()))
                    for w, d in zip(weights, v, strict=True)
                ]
            second = grad_and_value(loss, argnums=searched)
            after, _ = vmap(second, in_dims=(0, 0, 0))(moved, images, labels)
        derivatives = [
            (a - b) / e.view(-1, *[1] * (a.dim() - 1)) for a, b in zip(after, before, strict=True)
        ]
        return self._match(distance.value, derivatives, like)


def classification_loss(logits: Tensor, labels: Tensor, loss: Loss | None = None) -> Tensor:
    """The client's loss to classes (B,) or to soft labels given by their logits (B, C), of which a
    model that joins copies of its pictures (`Informed`) gives several batches."""
    loss = loss or Loss()
    if len(logits) > len(labels):
        copies = len(logits) // len(labels)
        labels = labels.repeat(copies, *[1] * (labels.dim() - 1))
    if labels.is_floating_point():
        whole = replace(loss, soft="mixed")  # the dominant class alone has no derivative
        return whole(logits.to(labels.dtype), labels.softmax(-1))
    return loss(logits if logits.dtype == torch.float64 else logits.float(), labels)


def norm_of(layers: Sequence[Tensor]) -> Tensor:
    """The global norm over all layers (S, ...), by seed: (S,)."""
    norms = [torch.linalg.vector_norm(layer.reshape(len(layer), -1), dim=1) for layer in layers]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)


def silence(model: nn.Module) -> list[str]:
    """Switch off everything random in ``model``; the names of the modules that drew."""
    names = _quieted(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            names += [name] if module.training else []
            module.p = 0.0
        elif isinstance(module, DropPath) and (module.drop_prob or 0) > 0:
            names += [name] if module.training else []
            module.drop_prob = 0.0
        elif isinstance(module, PatchDropout) and module.prob > 0:
            names += [name] if module.training else []
            module.prob = 0.0
        elif isinstance(module, _BatchNorm):
            module.momentum = 0.0  # the attacker's passes must not move the running statistics
    return names


def _quieted(model: nn.Module) -> list[str]:
    """Take a model of anybody's that tosses coins in training, wherever it does, out of training,
    but for what reads the batch's own statistics; its name, unless its dropouts tell."""
    found = found_in(model)
    if found is None or not found.tosses or not model.training:
        return []
    told = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules())
    batchnorms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    names = [] if told else [type(model).__name__]
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            continue  # told and switched off by its rate
        module.training = False
    for module in batchnorms:
        module.training = True
    return names


@contextlib.contextmanager
def _plain_attention(model: nn.Module) -> Iterator[None]:
    """Attention spelled out, in place of the fused kernel: timm's by its own switch, anybody's by
    torch's."""
    fused = [m for m in model.modules() if getattr(m, "fused_attn", False) is True]
    for module in fused:
        module.__dict__["fused_attn"] = False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for module in fused:
            module.__dict__["fused_attn"] = True


twice_differentiable = _plain_attention  # the fused kernel has no second derivative


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 in convolutions and products: a difference of two passes would drown in it."""
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = convolutions.allow_tf32, products.allow_tf32
    convolutions.allow_tf32 = products.allow_tf32 = False
    try:
        yield
    finally:
        convolutions.allow_tf32, products.allow_tf32 = before


@contextlib.contextmanager
def _listening(features: FeaturePrior | None, model: nn.Module) -> Iterator[None]:
    if features is None:
        yield
        return
    with features.listening(model):
        yield


def filled(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    """Gradients with zeros where a tensor was not used."""
    return [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, like, strict=True)]

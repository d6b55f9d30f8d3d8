"""Matchers: the matching loss of some images, and its derivative in them.

With v the derivative of the objective in the client's gradient, the derivative in the images is
that of <v, grad_theta L(x, theta)>, and there are two ways to it:

- ``double`` differentiates the gradient itself (create_graph): exact, and the reference.
- ``first_order`` uses that  d/dx <v, grad_theta L> = d/de grad_x L(x, theta + e v)  and takes the
  difference of two first-order passes, of which the second needs no gradient of the weights:
  5/3 of a plain training step in the limit, at training memory, with fused attention. It is a
  difference in float32, so it wants full precision.

A matcher simulates one kind of client: `GradientMatcher` one gradient, `UnrolledMatcher` several
local steps by an adjoint through them, `SurrogateMatcher` several local steps by one gradient at
a point between the weights before and after (SME, Zhu et al. 2023).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from timm.layers import DropPath, PatchDropout
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from attacks.objectives import Distance, Objective, Target
from attacks.priors import FeaturePrior
from attacks.surrogates import KinkTape, as_matrix, tape_kinks
from fedsim.core.errors import AttackError
from fedsim.core.learning import Protocol

Way = Literal["first_order", "double"]
Precision = Literal["float32", "bfloat16", "float16", "float64"]
STEP = 3e-4  # |e v|: small against the curvature, large against the rounding of float32
BATCHED_ON_CPU = 1  # images a seed up to which a CPU searches seeds as one batch
AGREEMENT = 0.999  # least cosine between the two ways for `auto` to trust the faster one


@dataclass
class Match:
    """The matching loss (S,) and its derivatives, a prior on features included."""

    value: Tensor
    images: Tensor  # (S, B, 3, H, W)
    labels: Tensor | None  # (S, B, C) where the labels are soft


@dataclass
class Matcher:
    """What all matchers share: the model without its dice, the layers to match, the way."""

    model: nn.Module
    target: Target
    objective: Objective
    way: Way = "first_order"
    precision: Precision = "float32"
    features: FeaturePrior | None = None
    compiled: bool = False
    step: float = STEP
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
        if self.precision in ("bfloat16", "float16") and self.way == "first_order":
            raise AttackError(
                f"first_order is a difference in float32 and would be lost in {self.precision}; "
                f"use engine: double for mixed precision."
            )
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
        found = [self._one(x, y) for x, y in zip(images, labels, strict=True)]
        soft = [match.labels for match in found if match.labels is not None]
        return Match(
            torch.stack([match.value for match in found]),
            torch.stack([match.images for match in found]),
            torch.stack(soft) if soft else None,
        )

    def state(self) -> dict[str, float]:
        """What changes from call to call, for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint."""

    def value(self, images: Tensor, labels: Tensor) -> Tensor:
        """The matching loss alone, (S,)."""
        return self(images, labels).value

    def _one(self, images: Tensor, labels: Tensor) -> Match:
        raise NotImplementedError

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

    def _match(self, value: Tensor, found: Sequence[Tensor], like: Tensor) -> Match:
        soft = found[1].to(like.dtype) if len(found) > 1 else None
        return Match(value.detach(), found[0].to(like.dtype), soft)


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
        self.batchable = self.way == "first_order" and plain

    def __call__(self, images: Tensor, labels: Tensor) -> Match:
        # On a CPU larger batches fill the cores by themselves.
        small = images.device.type == "cuda" or images.shape[1] <= BATCHED_ON_CPU
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
                loss = classification_loss(self.run(x), y)
            graph = torch.autograd.grad(loss, self.weights, create_graph=True, allow_unused=True)
            gradients = _filled(graph, self.weights)
            with torch.no_grad():
                distance = self.objective([g.detach()[None] for g in gradients], self.target)
                v = distance.derivative(self.target)
            linked = [(g, w[0]) for g, w in zip(gradients, v, strict=True) if g.requires_grad]
            product = torch.stack([(g * w).sum() for g, w in linked]).sum()
            penalty = self.features.penalty() if self.features else None
            total = product if penalty is None else product + penalty
            found = torch.autograd.grad(total, searched)
        return self._match(distance.value[0], found, images)

    def _first_order(self, images: Tensor, labels: Tensor) -> Match:
        assert self.probe is not None
        x, y, searched = self._leaves(images, labels)
        self.tape.record()
        loss = classification_loss(self.run(x), y)
        found = torch.autograd.grad(loss, [*self.weights, *searched], allow_unused=True)
        gradients = _filled(found[: len(self.weights)], self.weights)
        with torch.no_grad():
            distance = self.objective([g[None] for g in gradients], self.target)
            e = (self.step / distance.norm.clamp(min=1e-30))[0]
            self._displace(distance, e)
        self.probe_tape.replay(self.tape.choices)
        with _listening(self.features, self.probe):
            loss = classification_loss(self.run_probe(x), y)
            penalty = self.features.penalty() if self.features else None
            if penalty is not None:  # in the same pass: scaled by e, so that dividing restores it
                loss = loss + e * penalty
            shifted = torch.autograd.grad(loss, searched)
        with torch.no_grad():
            derivative = [
                (after - before) / e
                for after, before in zip(shifted, found[len(self.weights) :], strict=True)
            ]
        return self._match(distance.value[0], derivative, images)

    def _displace(self, distance: Distance, e: Tensor) -> None:
        """The probe's weights: theta + e v, without building v."""
        own, towards = e * distance.own[:, 0], e * distance.towards[:, 0]
        # Numbers are faster than tensors of one number on a CPU; on a GPU they would wait for it.
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
            return classification_loss(functional_call(self.model, state, (x,)), y)

        searched = (1, 2) if soft else (1,)
        weights = [w.detach() for w in self.weights]
        with plain_attention(self.model), full_precision():
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
        found = [
            (a - b) / e.view(-1, *[1] * (a.dim() - 1)) for a, b in zip(after, before, strict=True)
        ]
        return self._match(distance.value, found, like)


class UnrolledMatcher(Matcher):
    """Several local steps, simulated one after the other: what FedAvg uploads.

    ``batches`` says which of the searched images each step uses. The derivative runs back
    through the steps as an adjoint; each step needs the product of its Hessian with it, which
    one more first-order pass gives as a difference, together with the derivative in the images.
    """

    def __init__(
        self, *args: Any, protocol: Protocol, batches: Sequence[Sequence[int]], **options: Any
    ):
        self.protocol, self.batches = protocol, [list(b) for b in batches]
        super().__init__(*args, **options)
        if self.features is not None:
            raise AttackError("a prior on BatchNorm features needs a single-gradient update.")
        if self.way == "first_order" and protocol.optimizer != "sgd":
            raise AttackError("the first-order adjoint is that of SGD; use engine: double.")
        self.start = [w.detach().clone() for w in self.weights]
        self.matched = [self.names.index(name) for name in self.target.names]
        self.tape = tape_kinks(self.model) if self.way == "first_order" else KinkTape()

    def _differentiated(self, parameters: Mapping[str, nn.Parameter]) -> list[str]:
        """Everything the client trains, matched or not: it all moves between the steps."""
        trained = [name for name, p in parameters.items() if p.requires_grad]
        return trained + [name for name in self.target.names if name not in trained]

    def _one(self, images: Tensor, labels: Tensor) -> Match:
        x, y, searched = self._leaves(images, labels)
        if self.way == "double":
            with twice_differentiable(self.model):
                return self._double(x, y, searched, images)
        with full_precision():
            return self._first_order(x, y, searched, images)

    def _double(self, x: Tensor, y: Tensor, searched: list[Tensor], like: Tensor) -> Match:
        buffers = dict(self.model.named_buffers())
        state = {n: p.detach() for n, p in self.model.named_parameters()}
        theta = [w.detach().clone().requires_grad_(True) for w in self.weights]
        first = list(theta)
        memory = OptimizerMemory(self.protocol)
        for rows in self.batches:
            named = state | dict(zip(self.names, theta, strict=True)) | buffers
            with self._casting():
                loss = classification_loss(functional_call(self.model, named, (x[rows],)), y[rows])
            gradients = _filled(
                torch.autograd.grad(loss, theta, create_graph=True, allow_unused=True), theta
            )
            theta = memory.step(theta, clipped(gradients, self.protocol.clip))
        delta = [theta[i] - first[i] for i in self.matched]
        with torch.no_grad():
            distance = self.objective([d.detach()[None] for d in delta], self.target)
            v = [w[0] for w in distance.derivative(self.target)]
        found = torch.autograd.grad(delta, searched, v, allow_unused=True)
        return self._match(distance.value[0], _filled(found, searched), like)

    def _first_order(self, x: Tensor, y: Tensor, searched: list[Tensor], like: Tensor) -> Match:
        lr, momentum, decay = (
            self.protocol.lr,
            self.protocol.momentum,
            self.protocol.weight_decay,
        )
        steps = []
        memory = OptimizerMemory(self.protocol)
        theta = [w.detach().clone() for w in self.weights]
        for rows in self.batches:
            self.tape.record()
            gradients, inner = self._pass(theta, x, y, rows, searched)
            steps.append((rows, theta, gradients, inner, self.tape.choices))
            theta = memory.step(theta, clipped(gradients, self.protocol.clip))
        with torch.no_grad():
            delta = [(theta[i] - self.start[i])[None] for i in self.matched]
            distance = self.objective(delta, self.target)
        on_theta = [torch.zeros_like(t) for t in theta]
        for i, v in zip(self.matched, distance.derivative(self.target), strict=True):
            on_theta[i] = v[0]
        on_memory = [torch.zeros_like(w) for w in on_theta]
        found = [torch.zeros_like(s) for s in searched]
        for rows, theta, gradients, inner, choices in reversed(steps):
            on_memory = [m.add(t, alpha=-lr) for m, t in zip(on_memory, on_theta, strict=True)]
            on_gradient = clipped_adjoint(on_memory, gradients, self.protocol.clip)
            on_theta = [t.add(m, alpha=decay) for t, m in zip(on_theta, on_memory, strict=True)]
            on_memory = [m * momentum for m in on_memory]
            e = self.step / norm_of([g[None] for g in on_gradient]).clamp(min=1e-30)
            moved = [t + e * g for t, g in zip(theta, on_gradient, strict=True)]
            self.tape.replay(choices)
            shifted, shifted_inner = self._pass(moved, x, y, rows, searched)
            on_theta = [
                t + (after - before) / e
                for t, after, before in zip(on_theta, shifted, gradients, strict=True)
            ]
            for total, after, before in zip(found, shifted_inner, inner, strict=True):
                total += (after - before) / e
        return self._match(distance.value[0], found, like)

    def _pass(
        self, theta: Sequence[Tensor], x: Tensor, y: Tensor, rows: list[int], searched: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of one local step in the weights and in what is searched, at ``theta``."""
        with torch.no_grad():
            for weight, value in zip(self.weights, theta, strict=True):
                weight.copy_(value)
        loss = classification_loss(self.model(x[rows]), y[rows])
        wanted = [*self.weights, *searched]
        found = _filled(torch.autograd.grad(loss, wanted, allow_unused=True), wanted)
        with torch.no_grad():
            for weight, value in zip(self.weights, self.start, strict=True):
                weight.copy_(value)
        return list(found[: len(theta)]), list(found[len(theta) :])


class SurrogateMatcher(GradientMatcher):
    """Several local steps seen as one gradient at theta + (1 - a) delta, with ``a`` learned.

    After SME (Zhu et al. 2023): somewhere between the weights before and after, the gradient of
    all the client's images points along the update. ``delta`` is the whole update, matched or not.
    """

    rate, width, every = 0.01, 0.02, 10

    def __init__(self, *args: Any, delta: Mapping[str, Tensor], **options: Any):
        super().__init__(*args, **options)
        own = dict(self.model.named_parameters())
        self.path = [(own[n], own[n].detach().clone(), d.to(own[n])) for n, d in delta.items()]
        self.probe_path = []
        if self.probe is not None:
            moved = dict(self.probe.named_parameters())
            self.probe_path = [(moved[n], own[n]) for n in delta if n not in self.target.names]
        self.share, self.calls = 0.5, 0
        self.batchable = False  # all seeds share the point, which moves
        self._move(self.share)

    def __call__(self, images: Tensor, labels: Tensor) -> Match:
        match = super().__call__(images, labels)
        self.calls += 1
        if self.calls % self.every == 0:  # the loss on either side says where the point goes
            before, after = (self._at(a, images, labels) for a in (-self.width, self.width))
            step = self.rate if before < after else -self.rate
            self.share = min(1.0, max(0.0, self.share - step))
            self._move(self.share)
        return match

    def state(self) -> dict[str, float]:
        return {"share": self.share, "calls": float(self.calls)}

    def restore(self, state: Mapping[str, float]) -> None:
        self.share, self.calls = state["share"], int(state["calls"])
        self._move(self.share)

    def _at(self, offset: float, images: Tensor, labels: Tensor) -> float:
        self._move(self.share + offset)
        return float(super().__call__(images, labels).value.mean())

    def _move(self, share: float) -> None:
        with torch.no_grad():
            for weight, start, delta in self.path:
                weight.copy_(torch.add(start, delta, alpha=1 - share))
            for moved, weight in self.probe_path:
                moved.copy_(weight)


class OptimizerMemory:
    """The client's optimiser on lists of tensors, differentiable: what `torch.optim` does."""

    def __init__(self, protocol: Protocol):
        self.protocol = protocol
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []
        self.count = 0

    def step(self, theta: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        p, self.count = self.protocol, self.count + 1
        if p.optimizer == "adamw":
            return self._adamw(theta, gradients)
        moves = [g + p.weight_decay * t for g, t in zip(gradients, theta, strict=True)]
        if self.first:
            moves = [p.momentum * m + d for m, d in zip(self.first, moves, strict=True)]
        self.first = moves
        return [t - p.lr * m for t, m in zip(theta, moves, strict=True)]

    def _adamw(self, theta: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        p, (one, two), tiny = self.protocol, (0.9, 0.999), 1e-8
        zero = [torch.zeros_like(t) for t in theta]
        self.first = [
            one * m + (1 - one) * g for m, g in zip(self.first or zero, gradients, strict=True)
        ]
        self.second = [
            two * m + (1 - two) * g * g for m, g in zip(self.second or zero, gradients, strict=True)
        ]
        mean, spread = 1 - one**self.count, 1 - two**self.count
        return [
            t * (1 - p.lr * p.weight_decay)
            - p.lr * (m / mean) / ((s / spread).clamp(min=1e-24).sqrt() + tiny)
            for t, m, s in zip(theta, self.first, self.second, strict=True)
        ]


def clipped(gradients: Sequence[Tensor], limit: float | None) -> list[Tensor]:
    """Gradients scaled to a global norm of at most ``limit``."""
    if limit is None:
        return list(gradients)
    norm = norm_of([g[None] for g in gradients])[0]
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    return [g * scale for g in gradients]


def clipped_adjoint(
    outer: Sequence[Tensor], gradients: Sequence[Tensor], limit: float | None
) -> list[Tensor]:
    """The transpose of clipping's derivative at ``gradients``, applied to ``outer``."""
    if limit is None:
        return list(outer)
    norm = norm_of([g[None] for g in gradients])[0]
    if float(norm) + 1e-6 <= limit:
        return list(outer)
    scale = limit / (norm + 1e-6)
    along = torch.stack([(o * g).sum() for o, g in zip(outer, gradients, strict=True)]).sum()
    back = limit / (norm + 1e-6) ** 2 / norm * along
    return [scale * o - back * g for o, g in zip(outer, gradients, strict=True)]


def classification_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy to classes (B,) or to soft labels given by their logits (B, C)."""
    if labels.is_floating_point():
        return F.cross_entropy(logits.to(labels.dtype), labels.softmax(-1))
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), labels)


def norm_of(layers: Sequence[Tensor]) -> Tensor:
    """The global norm over all layers (S, ...), by seed: (S,)."""
    norms = [torch.linalg.vector_norm(layer.flatten(1), dim=1) for layer in layers]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)


def silence(model: nn.Module) -> list[str]:
    """Switch off what draws at random in ``model``; names of the modules that did."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            found += [name] if module.training else []
            module.p = 0.0
        elif isinstance(module, DropPath) and (module.drop_prob or 0) > 0:
            found += [name] if module.training else []
            module.drop_prob = 0.0
        elif isinstance(module, PatchDropout) and module.prob > 0:
            found += [name] if module.training else []
            module.prob = 0.0
        elif isinstance(module, _BatchNorm):
            module.momentum = 0.0  # the attacker's passes must not move the running statistics
    return found


@contextlib.contextmanager
def plain_attention(model: nn.Module) -> Iterator[None]:
    """Attention spelled out, in place of the fused kernel."""
    fused = [m for m in model.modules() if getattr(m, "fused_attn", False) is True]
    for module in fused:
        module.__dict__["fused_attn"] = False
    try:
        yield
    finally:
        for module in fused:
            module.__dict__["fused_attn"] = True


twice_differentiable = plain_attention  # the fused kernel has no second derivative


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


def _filled(found: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    """Gradients with zeros where a tensor was not used."""
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, like, strict=True)]

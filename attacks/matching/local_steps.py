"""Local steps: matchers of clients that take several before they upload (FedAvg).

`UnrolledMatcher` simulates the steps and goes back through them by an adjoint; `PathMatcher` sees
them as one gradient at a point between the weights before and after (SME, Zhu et al. 2023), whose
cost does not grow with the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsim.attacks.matching.matcher import (
    GradientMatcher,
    Match,
    Matcher,
    classification_loss,
    filled,
    full_precision,
    norm_of,
    twice_differentiable,
)
from fedsim.attacks.matching.smooth_modules import KinkTape, tape_kinks
from fedsim.core.errors import AttackError
from fedsim.core.learning import Protocol


class UnrolledMatcher(Matcher):
    """Several local steps, simulated one after the other: what FedAvg uploads.

    ``batches`` says which of the searched images each step uses. The derivative runs back through
    the steps as an adjoint; each step needs the product of its Hessian with it, which one more
    first-order pass gives as a difference, together with the derivative in the images.
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
        memory = OptimizerMemory(self.protocol, len(self.batches))
        for rows in self.batches:
            named = state | dict(zip(self.names, theta, strict=True)) | buffers
            with self._casting():
                logits = functional_call(self.model, named, (x[rows],))
                loss = classification_loss(logits, y[rows], self.loss)
            gradients = filled(
                torch.autograd.grad(loss, theta, create_graph=True, allow_unused=True), theta
            )
            gradients = self._pulled_back(gradients, theta, first)
            theta = memory.step(theta, clipped(gradients, self.protocol.clip))
        delta = [theta[i] - first[i] for i in self.matched]
        with torch.no_grad():
            distance = self.objective([d.detach()[None] for d in delta], self.target)
            v = [w[0] for w in distance.derivative(self.target)]
        derivatives = torch.autograd.grad(delta, searched, v, allow_unused=True)
        return self._match(distance.value[0], filled(derivatives, searched), like)

    def _first_order(self, x: Tensor, y: Tensor, searched: list[Tensor], like: Tensor) -> Match:
        momentum, decay = self.protocol.momentum, self.protocol.weight_decay
        steps = []
        memory = OptimizerMemory(self.protocol, len(self.batches))
        theta = [w.detach().clone() for w in self.weights]
        for rows in self.batches:
            self.tape.record()
            gradients, inner = self._pass(theta, x, y, rows, searched)
            whole = self._pulled_back(gradients, theta, self.start)
            steps.append((rows, theta, gradients, whole, inner, self.tape.choices))
            theta = memory.step(theta, clipped(whole, self.protocol.clip))
        with torch.no_grad():
            delta = [(theta[i] - self.start[i])[None] for i in self.matched]
            distance = self.objective(delta, self.target)
        on_theta = [torch.zeros_like(t) for t in theta]
        for i, v in zip(self.matched, distance.derivative(self.target), strict=True):
            on_theta[i] = v[0]
        on_memory = [torch.zeros_like(w) for w in on_theta]
        derivatives = [torch.zeros_like(s) for s in searched]
        backwards = zip(reversed(steps), reversed(memory.rates), strict=True)
        for (rows, theta, gradients, whole, inner, choices), lr in backwards:
            on_memory = [m.add(t, alpha=-lr) for m, t in zip(on_memory, on_theta, strict=True)]
            on_gradient = _clipped_adjoint(on_memory, whole, self.protocol.clip)
            on_theta = [t.add(m, alpha=decay) for t, m in zip(on_theta, on_memory, strict=True)]
            on_memory = [m * momentum for m in on_memory]
            e = self.step / norm_of([g[None] for g in on_gradient])[0].clamp(min=1e-30)
            moved = [t + e * g for t, g in zip(theta, on_gradient, strict=True)]
            self.tape.replay(choices)
            shifted, shifted_inner = self._pass(moved, x, y, rows, searched)
            on_theta = [
                t + (after - before) / e
                for t, after, before in zip(on_theta, shifted, gradients, strict=True)
            ]
            on_theta = self._pulled_back(on_theta, on_gradient)
            for total, after, before in zip(derivatives, shifted_inner, inner, strict=True):
                total += (after - before) / e
        return self._match(distance.value[0], derivatives, like)

    def _pulled_back(
        self,
        gradients: Sequence[Tensor],
        theta: Sequence[Tensor],
        start: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Gradients with FedProx's pull back to the ``start``, or the transpose of that pull."""
        strength = self.protocol.proximal
        if not strength:
            return list(gradients)
        away = theta if start is None else [t - s for t, s in zip(theta, start, strict=True)]
        return [g + strength * a for g, a in zip(gradients, away, strict=True)]

    def _pass(
        self, theta: Sequence[Tensor], x: Tensor, y: Tensor, rows: list[int], searched: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of one local step in the weights and in what is searched, at ``theta``."""
        with torch.no_grad():
            for weight, value in zip(self.weights, theta, strict=True):
                weight.copy_(value)
        loss = classification_loss(self.model(x[rows]), y[rows], self.loss)
        wanted = [*self.weights, *searched]
        gradients = filled(torch.autograd.grad(loss, wanted, allow_unused=True), wanted)
        with torch.no_grad():
            for weight, value in zip(self.weights, self.start, strict=True):
                weight.copy_(value)
        return list(gradients[: len(theta)]), list(gradients[len(theta) :])


class PathMatcher(GradientMatcher):
    """Several local steps seen as one gradient at theta + (1 - a) delta, with ``a`` learned.

    After SME (Zhu et al. 2023): somewhere between the weights before and after, the gradient of all
    the client's images points along the update. ``delta`` is the whole update, matched or not.
    """

    rate, width, every = 0.01, 0.02, 10

    def __init__(self, *args: Any, delta: Mapping[str, Tensor], **options: Any):
        super().__init__(*args, **options)
        parameters = dict(self.model.named_parameters())
        self.path = [
            (parameters[n], parameters[n].detach().clone(), d.to(parameters[n]))
            for n, d in delta.items()
        ]
        self.probe_path = []
        if self.probe is not None:
            moved = dict(self.probe.named_parameters())
            self.probe_path = [
                (moved[n], parameters[n]) for n in delta if n not in self.target.names
            ]
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

    def __init__(self, protocol: Protocol, steps: int = 1):
        self.protocol, self.rates = protocol, protocol.rates(steps)
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []
        self.count = 0

    def step(self, theta: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        p, self.count = self.protocol, self.count + 1
        if p.optimizer != "sgd":
            return self._adaptive(theta, gradients)
        moves = [g + p.weight_decay * t for g, t in zip(gradients, theta, strict=True)]
        if self.first:
            moves = [p.momentum * m + d for m, d in zip(self.first, moves, strict=True)]
        self.first = moves
        lr = self.rate
        return [t - lr * m for t, m in zip(theta, moves, strict=True)]

    @property
    def rate(self) -> float:
        """Of the step that is taken; after the last announced one, that one's."""
        return self.rates[min(self.count, len(self.rates)) - 1]

    def _adaptive(self, theta: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Adam, whose weight decay is a part of the gradient, and AdamW, whose is not."""
        p, tiny, lr = self.protocol, 1e-8, self.rate
        (one, two), decay = p.betas, p.weight_decay
        if p.optimizer == "adam":
            gradients = [g + decay * t for g, t in zip(gradients, theta, strict=True)]
            decay = 0.0
        zero = [torch.zeros_like(t) for t in theta]
        self.first = [
            one * m + (1 - one) * g for m, g in zip(self.first or zero, gradients, strict=True)
        ]
        self.second = [
            two * m + (1 - two) * g * g for m, g in zip(self.second or zero, gradients, strict=True)
        ]
        mean, spread = 1 - one**self.count, 1 - two**self.count
        return [
            t * (1 - lr * decay) - lr * (m / mean) / ((s / spread).clamp(min=1e-24).sqrt() + tiny)
            for t, m, s in zip(theta, self.first, self.second, strict=True)
        ]


def clipped(gradients: Sequence[Tensor], limit: float | None) -> list[Tensor]:
    """Gradients scaled to a global norm of at most ``limit``."""
    if limit is None:
        return list(gradients)
    norm = norm_of([g[None] for g in gradients])[0]
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    return [g * scale for g in gradients]


def _clipped_adjoint(
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

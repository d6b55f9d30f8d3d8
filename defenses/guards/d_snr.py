"""D-SNR (Garov et al. 2024, "Hiding in Plain Sight"): does one picture drown out the others?

    D-SNR = max over layers, over pictures i, of  |g_i| / sum of |g_j|, j other than i

with g_i the gradient of picture i's own loss in the layer's weight. A server that fishes one
picture out of a batch must let the others' gradients vanish somewhere, and that is what it shows.

An honest model that knows all of a batch by heart but one picture shows the same. So a gradient
counts by its residual, |p - y| at the output: what is small because the picture is known is no
sign, and what is small although it is not known is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.anatomy import batchnorm_names, head_names
from fedsim.core.errors import ModelError
from fedsim.core.guard import Finding, Guard, Scene
from fedsim.defenses.guards.calibration import d_snr_limit

KNOWN = 1e-5  # the residual below which a gradient is little more than rounding
CHUNK = 16  # pictures whose activations are held at once


@dataclass(frozen=True, kw_only=True)
class DSnr(Guard):
    """``limit``: the largest D-SNR that is no sign; without it, what honest batches of that size
    stay below (`fedsim.defenses.guards.calibration`). ``plain``: the paper's number, without regard
    to what the model knows by heart; it sees fishing by features too, and overfitted models.

    Looks at every picture of every batch of the round, with the weights as they were received. A
    sample would not do: most samples miss the picture that is fished, and the others look like an
    honest batch among themselves. A batch of which nothing at all reaches the model, though its
    head is not zero and the pictures are not known by heart, is a sign of its own.
    """

    limit: Annotated[float, Field(gt=0)] | None = None
    plain: bool = False

    def inspect(self, scene: Scene) -> Finding:
        findings = [self._of_batch(scene, images, labels) for images, labels in scene.batches]
        return max(findings, key=lambda f: math.inf if _odd(f.score) else f.score / f.limit)

    def _of_batch(self, scene: Scene, images: Tensor, labels: Tensor) -> Finding:
        count = len(labels)
        limit = self.limit_for(count)
        norms, residuals = gradient_norms(scene.model, scene.protocol.normalise(images), labels)
        if not norms:
            words = "the model has no plain linear or convolutional layer to look at"
            return Finding("d_snr", 0.0, limit, words)
        unknown = ~(residuals < KNOWN)  # what is no number is not known
        if _is_silenced(scene.model, norms) and bool(unknown.any()):
            words = f"none of {count} pictures reaches the model, and {int(unknown.sum())} should"
            return Finding("d_snr", math.inf, limit, words)
        if count < 2:
            words = "a batch of one picture: there are no others that it could be isolated from"
            return Finding("d_snr", 0.0, limit, words)
        ratios = {name: d_snr(each) for name, each in norms.items()}
        if not self.plain:
            limit, weights = self.limit_for(int(unknown.sum())), residuals[unknown]
            explained = {name: d_snr(each[unknown] / weights) for name, each in norms.items()}
            ratios = {name: _smaller(ratios[name], explained[name]) for name in ratios}
        # what is no number (a gradient that overflows) is worse than any
        worst = max(ratios, key=lambda name: math.inf if _odd(ratios[name]) else ratios[name])
        words = (
            f"in '{worst}' one of {count} pictures has a gradient {ratios[worst]:.3g} times as "
            f"large as those of all others together"
        )
        if not self.plain:
            words += f", by their residuals ({count - int(unknown.sum())} known by heart)"
        if batchnorm_names(scene.model) and scene.model.training:
            words += "; BatchNorm taken by its running statistics: in batches nobody is alone"
        return Finding("d_snr", ratios[worst], limit, words)

    def limit_for(self, pictures: int) -> float:
        """The limit where so many pictures are compared."""
        return d_snr_limit(pictures, plain=self.plain) if self.limit is None else self.limit


def _is_silenced(model: nn.Module, norms: dict[str, Tensor]) -> bool:
    """Whether every layer but the head has no gradient at all, though the head is not zero."""
    try:
        head = head_names(model)[0]
    except ModelError:
        return False
    before = [each for name, each in norms.items() if f"{name}.weight" != head]
    if not before or not bool(model.get_parameter(head).any()):
        return False
    return not any(bool(each.any()) for each in before)


def _smaller(one: float, other: float) -> float:
    return one if _odd(one) or one < other else other


def _odd(number: float) -> bool:
    return number != number


def d_snr(norms: Tensor) -> float:
    """The D-SNR of one layer, whose per-picture gradients have these norms; 0 where there are no
    two to compare, or all vanish: then no picture shows."""
    if len(norms) < 2:
        return 0.0
    largest = norms.max()
    if largest == 0:
        return 0.0
    # not the sum less the largest: what is left of a fished batch is below its rounding
    others = norms.sort().values[:-1].sum()
    return float(largest / others)


def gradient_norms(
    model: nn.Module, images: Tensor, labels: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """The norm (B,) of each picture's own gradient in the weight of every linear and convolutional
    layer, by the layer's name, and its residual |p - y| (B,). ``images`` are normalised already.
    Exact, in eval mode.

    One forward and one backward pass of the whole batch: in eval mode no picture meets another, so
    each layer's inputs and output gradients tell the pictures' gradients apart.
    """
    layers = {name: module for name, module in model.named_modules() if _is_plain(module)}
    parts: list[dict[str, Tensor]] = []
    residuals: list[Tensor] = []
    with _evaluating(model):
        for at in range(0, len(images), CHUNK):
            chosen = slice(at, at + CHUNK)
            part, residual = _norms_of_chunk(model, layers, images[chosen], labels[chosen])
            parts.append(part)
            residuals.append(residual)
    seen = set(layers).intersection(*parts)  # a layer may be skipped by some pictures
    norms = {name: torch.cat([part[name] for part in parts]) for name in layers if name in seen}
    return norms, torch.cat(residuals)


def _norms_of_chunk(
    model: nn.Module, layers: dict[str, nn.Module], images: Tensor, labels: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    calls: list[tuple[str, Tensor, Tensor]] = []  # layer, input, output

    def listener(name: str):  # type: ignore[no-untyped-def]
        def listen(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            if output.requires_grad and len(output) == len(labels):
                calls.append((name, given[0].detach(), output))

        return listen

    hooks = [module.register_forward_hook(listener(name)) for name, module in layers.items()]
    try:
        with torch.enable_grad():
            logits = model(images)
            loss = F.cross_entropy(logits, labels, reduction="sum")
            outputs = [output for _, _, output in calls]
            slopes = torch.autograd.grad(loss, outputs, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    rows: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for (name, given, _), slope in zip(calls, slopes, strict=True):
        if slope is not None:
            rows.setdefault(name, []).append(_rows(layers[name], given, slope))
    return {name: _norms(used) for name, used in rows.items()}, _residuals(logits.detach(), labels)


def _residuals(logits: Tensor, labels: Tensor) -> Tensor:
    """|p - y|, from the other classes alone: 1 - p of the own class would be lost in rounding."""
    others = logits.softmax(dim=1).scatter(1, labels[:, None], 0.0)
    return (others.square().sum(dim=1) + others.sum(dim=1).square()).sqrt()


def _is_plain(module: nn.Module) -> bool:
    """A layer whose weight's gradient is the sum of inputs times output gradients; what derives
    from one and computes something else is left out."""
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward and module.weight.requires_grad
    if isinstance(module, nn.Conv2d):
        plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return type(module).forward is nn.Conv2d.forward and plain and module.weight.requires_grad
    return False


def _rows(layer: nn.Module, given: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """What met the weight at each position, (B, groups, T, inputs), and the gradient of what came
    out there, (B, groups, T, outputs)."""
    count = len(given)
    if isinstance(layer, nn.Linear):
        return (
            given.reshape(count, 1, -1, given.shape[-1]),
            slope.reshape(count, 1, -1, slope.shape[-1]),
        )
    assert isinstance(layer, nn.Conv2d)
    assert not isinstance(layer.padding, str)
    patches = F.unfold(given, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    inputs = patches.reshape(count, layer.groups, -1, patches.shape[-1])
    outputs = slope.reshape(count, layer.groups, -1, patches.shape[-1])
    return inputs.transpose(2, 3), outputs.transpose(2, 3)


def _norms(used: list[tuple[Tensor, Tensor]]) -> Tensor:
    """|sum over t of output gradient (t) x input (t)| of every picture, over all uses of a layer.

    The squared norm is also the sum over s, t of <in s, in t> <out s, out t>, which is cheaper
    where positions are few.
    """
    inputs = torch.cat([given for given, _ in used], dim=2)
    outputs = torch.cat([slope for _, slope in used], dim=2)
    positions, wide, high = inputs.shape[2], inputs.shape[3], outputs.shape[3]
    # Scaled to 1, so that squares of tiny gradients do not vanish.
    scale = outputs.abs().amax(dim=(1, 2, 3), keepdim=True)
    outputs = outputs / scale.clamp(min=torch.finfo(outputs.dtype).tiny)
    if positions * (wide + high) < wide * high:
        products = (inputs @ inputs.transpose(2, 3)) * (outputs @ outputs.transpose(2, 3))
        squares = products.sum(dim=(1, 2, 3)).clamp(min=0)
    else:
        squares = (outputs.transpose(2, 3) @ inputs).square().sum(dim=(1, 2, 3))
    return squares.sqrt() * scale.flatten()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, and every part back in its own mode after."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode

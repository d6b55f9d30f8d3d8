"""R-GAP (Zhu, Blaschko 2021): one image, layer by layer from the head back, in closed form.

Of every layer the output u and the gradient d = dL/du are known once the next layer is done; its
input x then solves two linear systems at once: the layer itself, W x = u (as far as the activation
can be undone), and its own gradient, dW = d x^T. For plain chains of convolutions and linear
layers, one image.

Where the systems have fewer equations than unknowns, a generator can fill in: min_z |A f(G(z)) - b|
with f the layers before (Jeon et al. 2021, Appendix C). It finds an image of the generator's, so it
pays off for few layers only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

from fedsim.attacks.closed import ClosedForm, Solved, refuse_frozen, uploaded
from fedsim.attacks.generators import generate, latent_size, latents_of
from fedsim.attacks.labels import labels_left, recover_labels
from fedsim.core.attack import Progress
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View
from fedsim.core.observation import Public
from fedsim.core.spec import Upload

LARGEST = 500_000_000  # numbers in one layer's system: 4 GB


@dataclass(frozen=True)
class Activation:
    """How to undo an activation: its inverse, where it can be undone, and its slope."""

    inverse: Callable[[Tensor], Tensor]
    undone: Callable[[Tensor], Tensor]  # output -> where the inverse holds
    slope: Callable[[Tensor], Tensor]  # output -> derivative


def _everywhere(y: Tensor) -> Tensor:
    return torch.ones_like(y, dtype=torch.bool)


def _on(y: Tensor) -> Tensor:
    """Which units of a ReLU were on; one that was off comes back as a number near zero."""
    return y > 1e-4 * y.max()


def _activation(module: nn.Module) -> Activation | None:
    if isinstance(module, nn.ReLU):
        return Activation(lambda y: y, _on, lambda y: _on(y).to(y.dtype))
    if isinstance(module, nn.LeakyReLU):
        a = module.negative_slope
        return Activation(
            lambda y: torch.where(y > 0, y, y / a),
            _everywhere,
            lambda y: torch.where(y > 0, torch.ones_like(y), torch.full_like(y, a)),
        )
    inside = 1 - 1e-12
    if isinstance(module, nn.Tanh):
        return Activation(
            lambda y: torch.atanh(y.clamp(-inside, inside)), _everywhere, lambda y: 1 - y * y
        )
    if isinstance(module, nn.Sigmoid):
        return Activation(
            lambda y: torch.logit(y.clamp(1 - inside, inside)), _everywhere, lambda y: y * (1 - y)
        )
    if isinstance(module, nn.Identity):
        return Activation(lambda y: y, _everywhere, torch.ones_like)
    return None


@dataclass(frozen=True)
class RGap(ClosedForm):
    """Solves in float64. The error of a layer is handed on to those before it, so depth hurts.

    ``generator``: which layers the threat model's generator solves: none, those whose system is
    underdetermined, or all; ``steps`` and ``seeds``: of its search.
    """

    generator: Literal["none", "underdetermined", "all"] = "none"
    steps: Annotated[int, Field(ge=1)] = 300
    seeds: Annotated[int, Field(ge=1)] = 8

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | ({"generator"} if self.generator != "none" else frozenset())

    def check_model(self, model: nn.Module, public: Public) -> None:
        _refuse_deltas(public.protocol.upload)
        layers = chain(model, public.image_size)
        if any(getattr(layer.module, "groups", 1) != 1 for layer in layers):
            raise AttackError(_GROUPED)
        refuse_frozen(model, [name for name, _ in model.named_parameters()], "rgap")

    def solve(self, view: View, model: nn.Module, progress: Progress) -> Solved:
        update, side = view.update, view.image_size
        _refuse_deltas(update.kind)
        names = list(update.tensors)
        gradients = dict(zip(names, uploaded(update.tensors, names, "rgap"), strict=True))
        notes = []
        if view.batch_size > 1:
            notes.append(f"underdetermined: {view.batch_size} images mix in one system")
        left = labels_left(view)
        known = left
        if known is None:
            protocol = view.known_protocol()
            known = recover_labels(update, model, view.batch_size, protocol=protocol)
        label = int(known[0])
        layers, fill = chain(model, side), None
        if self.generator != "none":
            fill = Filler(
                view.generator(), layers, _normalise(view), self.steps, self.seeds, view.coin()
            )
        x = invert(
            layers,
            gradients,
            (3, side, side),
            label,
            notes,
            progress,
            fill,
            self.generator == "all",
        )
        return Solved(x.view(3, side, side), notes=notes)


@dataclass(frozen=True)
class Layer:
    """A convolution or a linear layer, and the activation after it."""

    name: str
    module: nn.Conv2d | nn.Linear
    after: Activation | None
    activation: nn.Module | None = None  # the module behind ``after``

    def __call__(self, x: Tensor) -> Tensor:
        """The layer's output, in float64."""
        weight, bias = self.module.weight.detach().double(), self.module.bias
        offset = bias.detach().double() if bias is not None else None
        if isinstance(self.module, nn.Linear):
            y = F.linear(x.flatten(1), weight, offset)
        else:
            m = self.module
            y = F.conv2d(x, weight, offset, m.stride, m.padding, m.dilation)
        return y if self.activation is None else self.activation(y)


@dataclass
class Filler:
    """A generator in place of a linear solve: its image that fits a system best."""

    generator: nn.Module
    layers: list[Layer]
    normalise: Callable[[Tensor], Tensor]
    steps: int
    seeds: int
    coin: torch.Generator

    def __call__(self, index: int, system: Tensor, side: Tensor) -> Tensor:
        """The input of layer ``index``."""
        net = copy.deepcopy(self.generator).double().cpu()
        z = torch.randn(self.seeds, latent_size(net), generator=self.coin, dtype=torch.float64)
        with torch.no_grad():
            latents = latents_of(net, z).clone()
        latents.requires_grad_(True)
        optimizer = torch.optim.Adam([latents], lr=0.1)
        best, least = torch.zeros(system.shape[1], dtype=torch.float64), math.inf
        for step in range(self.steps):
            x = self.normalise(generate(net, latents))
            for layer in self.layers[:index]:
                x = layer(x)
            misfit = (x.flatten(1) @ system.T - side).square().sum(1)
            closest = int(misfit.argmin())
            if float(misfit[closest].detach()) < least:
                least, best = float(misfit[closest].detach()), x[closest].detach().flatten()
            optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * step / self.steps))
            optimizer.zero_grad(set_to_none=True)
            misfit.sum().backward(inputs=[latents])
            optimizer.step()
        return best


_GROUPED = "rgap does not invert grouped convolutions."


def _refuse_deltas(kind: Upload) -> None:
    if kind is not Upload.GRADIENT:
        raise AttackError("rgap works on one gradient, not on a weight delta.")


def chain(model: nn.Module, side: int) -> list[Layer]:
    """The layers of a plain network, in order; anything else is declined, as is one whose forward
    does more with a picture of this ``side`` than its modules say."""
    layers: list[Layer] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            layers.append(Layer(name, module, None))
        elif isinstance(module, nn.Flatten | nn.Sequential) or module is model:
            continue
        elif (activation := _activation(module)) is not None and layers:
            if layers[-1].after is not None:
                raise AttackError(f"rgap finds two activations in a row at '{name}'.")
            layers[-1] = Layer(layers[-1].name, layers[-1].module, activation, module)
        else:
            raise AttackError(
                f"rgap inverts plain chains of convolutions, linear layers and activations; "
                f"'{name}' is a {type(module).__name__}."
            )
    if not layers or not isinstance(layers[-1].module, nn.Linear) or layers[-1].after is not None:
        raise AttackError("rgap needs a network that ends in a linear layer.")
    if not _is_all(model, layers, side):
        raise AttackError(
            f"rgap inverts plain chains, and the layers of a {type(model).__name__} one after the "
            f"other do not give its logits: its forward does more."
        )
    return layers


def _is_all(model: nn.Module, layers: list[Layer], side: int) -> bool:
    """Whether these layers one after the other are the whole model."""
    weight = layers[0].module.weight
    if weight.is_meta:  # nothing to compare
        return True
    picture = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    x = picture.double().to(weight.device)
    training = model.training
    try:
        with torch.no_grad():
            logits = model.eval()(picture.to(weight))
            for layer in layers:
                x = layer(x)
    except RuntimeError:  # in this order they do not even fit
        return False
    finally:
        model.train(training)
    return x.shape == logits.shape and torch.allclose(x.to(logits), logits, rtol=1e-3, atol=1e-4)


def invert(
    layers: list[Layer],
    gradients: dict[str, Tensor],
    shape: tuple[int, int, int],
    label: int,
    notes: list[str],
    progress: Progress,
    fill: Filler | None = None,
    fill_all: bool = False,
) -> Tensor:
    """The input of the first layer, from the gradients of all."""
    shapes = _shapes(layers, shape)
    head = layers[-1]
    weight = head.module.weight.detach().double()
    x, d = _head(head, gradients, label)
    for index in range(len(layers) - 2, -1, -1):
        layer, inner = layers[index], shapes[index]
        activation = layer.after or Activation(lambda y: y, _everywhere, torch.ones_like)
        following = layers[index + 1].module
        outer = _back(following, weight, d, shapes[index + 1])
        out = x.reshape(shapes[index + 1])
        u = activation.inverse(out).flatten()
        known = activation.undone(out).flatten()
        d = (outer.reshape(shapes[index + 1]) * activation.slope(out)).flatten()
        weight = layer.module.weight.detach().double()
        bias = layer.module.bias
        if bias is not None:
            u = u - _spread(bias.detach().double(), shapes[index + 1], layer.module)
        system, side = _system(layer, weight, u, known, d, gradients, inner)
        x, rank = _least_squares(system, side)
        if fill is not None and (fill_all or rank < system.shape[1]):
            notes.append(f"{layer.name} from the generator (rank {rank} of {system.shape[1]})")
            x = fill(index, system, side)
        elif rank < system.shape[1]:
            notes.append(
                f"underdetermined: rank {rank} for the {system.shape[1]} inputs of {layer.name}"
            )
        progress(len(layers) - 1 - index, len(layers) - 1)
    return x


def _head(layer: Layer, gradients: dict[str, Tensor], label: int) -> tuple[Tensor, Tensor]:
    """Features and logit gradient of one image: dW = d h^T, with d = db, or found from p - y."""
    d_weight = gradients.get(f"{layer.name}.weight")
    if d_weight is None:
        raise AttackError("rgap needs the gradient of the head, which was not uploaded.")
    d = gradients.get(f"{layer.name}.bias")
    if d is not None:
        return d_weight.T @ d / d.square().sum().clamp(min=1e-300), d
    return _head_without_bias(layer, d_weight, label)


def _head_without_bias(layer: Layer, d_weight: Tensor, label: int) -> tuple[Tensor, Tensor]:
    """dW = (p - y) h^T leaves the size of h open; p = softmax(W h) fixes it, by bisection."""
    left, size, right = torch.linalg.svd(d_weight, full_matrices=False)
    d, h = left[:, 0], right[0] * size[0]
    if float(d[label]) > 0:  # the true class is the one that is pulled up
        d, h = -d, -h
    weight = layer.module.weight.detach().double()
    low, high = torch.tensor(1e-8, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    for _ in range(200):  # d scaled by s must be softmax(W h / s) - y at the label
        s = (low + high) / 2
        wanted = (weight @ (h / s)).softmax(0)[label] - 1
        if float(s * d[label]) > float(wanted):
            low = s
        else:
            high = s
    return h / s, d * s


def _back(module: nn.Module, weight: Tensor, d: Tensor, inner: tuple[int, ...]) -> Tensor:
    """The gradient in a layer's input, from that in its output."""
    if isinstance(module, nn.Linear):
        return weight.T @ d
    assert isinstance(module, nn.Conv2d)
    rows = d.view(1, module.out_channels, *_out(module, inner))
    result: Tensor = conv2d_input(
        (1, *inner),
        weight,
        rows,
        module.stride,
        module.padding,
        module.dilation,
    )
    return result.flatten()


def _system(
    layer: Layer,
    weight: Tensor,
    u: Tensor,
    known: Tensor,
    d: Tensor,
    gradients: dict[str, Tensor],
    inner: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Both systems for the layer's input in one, each scaled to rows of mean norm one."""
    d_weight = gradients.get(f"{layer.name}.weight")
    if d_weight is None:
        raise AttackError(f"rgap needs the gradient of {layer.name}, which was not uploaded.")
    entries = (len(u) + d_weight.numel()) * math.prod(inner)
    if entries > LARGEST:
        raise AttackError(
            f"rgap would need a system of {entries / 1e9:.1f} billion numbers for {layer.name}; "
            f"use smaller images or fewer channels."
        )
    forward, backward = _matrices(layer.module, weight, d, inner)
    systems = [(forward[known], u[known]), (backward, d_weight.flatten())]
    scaled = [(a, b, a.norm(dim=1).mean().clamp(min=1e-300)) for a, b in systems if len(a)]
    system = torch.cat([a / size for a, _, size in scaled])
    side = torch.cat([b / size for _, b, size in scaled])
    return system, side


def _least_squares(system: Tensor, side: Tensor) -> tuple[Tensor, int]:
    solution = torch.linalg.lstsq(system, side[:, None], driver="gelsd", rcond=1e-10)
    return solution.solution[:, 0], int(solution.rank)


def _normalise(view: View) -> Callable[[Tensor], Tensor]:
    mean, std = (torch.tensor(c, dtype=torch.float64).view(3, 1, 1) for c in view.normalisation)
    return lambda images: (images - mean) / std


def _matrices(
    module: nn.Module, weight: Tensor, d: Tensor, inner: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The layer as a matrix on its input, and its weight gradient as one."""
    size = math.prod(inner)
    if isinstance(module, nn.Linear):
        backward = torch.einsum("o,ij->oij", d, torch.eye(size, dtype=d.dtype)).reshape(-1, size)
        return weight, backward
    assert isinstance(module, nn.Conv2d)
    if module.groups != 1:
        raise AttackError(_GROUPED)
    options: dict[str, Any] = {
        "kernel_size": module.kernel_size,
        "dilation": module.dilation,
        "padding": module.padding,
        "stride": module.stride,
    }
    numbers = torch.arange(1, size + 1, dtype=torch.float64).view(1, *inner)
    where = F.unfold(numbers, **options)[0].long() - 1  # (C k k, L): input index, -1 in the padding
    taps, places = where.shape
    out = len(weight)
    inside = where >= 0
    tap, place = torch.nonzero(inside, as_tuple=True)
    column = where[inside]
    forward = torch.zeros(out, places, size, dtype=torch.float64)
    forward[:, place, column] = weight.reshape(out, taps)[:, tap]
    backward = torch.zeros(out, taps, size, dtype=torch.float64)
    backward[:, tap, column] = d.view(out, places)[:, place]
    return forward.view(-1, size), backward.view(-1, size)


def _shapes(layers: list[Layer], shape: tuple[int, int, int]) -> list[tuple[int, ...]]:
    """The shape of every layer's input."""
    shapes: list[tuple[int, ...]] = [shape]
    for layer in layers[:-1]:
        inner = shapes[-1]
        if isinstance(layer.module, nn.Linear):
            shapes.append((layer.module.out_features,))
        else:
            shapes.append((layer.module.out_channels, *_out(layer.module, inner)))
    return shapes


def _out(module: nn.Conv2d, inner: tuple[int, ...]) -> tuple[int, int]:
    with torch.no_grad():
        output = F.conv2d(
            torch.zeros(1, inner[0], *inner[1:]),
            torch.zeros(1, inner[0] // module.groups, *module.kernel_size),
            None,
            module.stride,
            module.padding,
            module.dilation,
        )
    return int(output.shape[-2]), int(output.shape[-1])


def _spread(bias: Tensor, outer: tuple[int, ...], module: nn.Module) -> Tensor:
    """A bias at every place of the output."""
    if isinstance(module, nn.Linear):
        return bias
    return bias.view(-1, 1, 1).expand(outer).flatten()

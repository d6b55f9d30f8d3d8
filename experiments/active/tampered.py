"""Tampered weights: what active servers send, each in its plainest form and gentler.

Stand-ins for guards to be tried on: the weights carry the mark of the attack, and nothing is
reconstructed from what comes back. Each function changes a model in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedsim.core.models import head_names, vit_parts


@torch.no_grad()
def class_fishing(model: nn.Module, target: int, coin: torch.Generator, gap: float) -> None:
    """Only pictures of ``target`` send a gradient behind the head: the other classes' rows are zero
    and their biases ``gap`` above its own."""
    head = head_of(model)
    row = torch.randn(head.weight.shape[1], generator=coin)
    head.weight.zero_()
    head.weight[target] = row / row.norm()
    if head.bias is not None:
        head.bias.fill_(gap)
        head.bias[target] = 0


@torch.no_grad()
def quiet_fishing(
    model: nn.Module, target: int, coin: torch.Generator, gap: float, part: float
) -> None:
    """Class fishing by a server that knows the limits: the other rows are no zeros but random and
    ``part`` as long as the target's, so that they still send that part of a gradient."""
    head = head_of(model)
    size = head.weight.norm(dim=1).median()
    rows = torch.randn(head.weight.shape, generator=coin)
    rows *= part * size / rows.norm(dim=1, keepdim=True)
    rows[target] /= part
    head.weight.copy_(rows)
    if head.bias is not None:
        head.bias.fill_(gap)
        head.bias[target] = 0


@torch.no_grad()
def feature_fishing(
    model: nn.Module, label: int, surrogate: Tensor, coin: torch.Generator, sharp: float, rank: int
) -> None:
    """Of pictures with one label, only those that lie below a threshold along a random direction
    send a gradient; ``rank`` of the surrogate pictures (normalised) lie below. Given the batch
    itself, it isolates better than a server could that does not hold it."""
    head = head_of(model)
    seen: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    training = model.training
    model.eval()(surrogate)
    model.train(training)
    hook.remove()
    direction = torch.randn(head.weight.shape[1], generator=coin)
    direction /= direction.norm()
    along = (torch.cat(seen) @ direction).sort().values
    threshold, spread = (along[rank - 1] + along[rank]) / 2, along.std().clamp(min=1e-12)
    head.weight.zero_()
    head.weight[label] = sharp / spread * direction
    if head.bias is not None:
        head.bias.zero_()
        head.bias[label] = -sharp / spread * threshold


@torch.no_grad()
def weak_head(model: nn.Module, scale: float) -> None:
    """The head times ``scale``: with 0, what it sends into the backbone is exactly nothing."""
    for name in head_names(model):
        model.get_parameter(name).mul_(scale)


@torch.no_grad()
def imprint(model: nn.Module, coin: torch.Generator, sharp: float, quiet: float) -> None:
    """Blocks of bins: attention silent, rows of the MLP's first layer ``sharp`` times one direction
    with biases in steps, its second layer ``quiet``; patches written into the tokens as they are,
    with coordinates left empty."""
    parts = vit_parts(model)
    projection = model.get_parameter(parts.patch_weight)
    width, pixels = len(projection), projection[0].numel()
    written = min(width - 28, pixels)
    basis = torch.linalg.qr(torch.randn(pixels, pixels, generator=coin)).Q[:written]
    projection.zero_()
    projection[:written] = 0.3 * basis.view(written, *projection.shape[1:])
    for name in parts.blocks[:-1]:
        model.get_parameter(f"{name}.attn.proj.weight").zero_()
        model.get_parameter(f"{name}.attn.proj.bias").zero_()
    for name in parts.blocks[1:-1]:
        first = model.get_parameter(f"{name}.mlp.fc1.weight")
        direction = torch.randn(width, generator=coin)
        direction /= direction.norm()
        steps = torch.linspace(-2, 2, len(first))
        first.copy_(sharp * direction.expand_as(first))
        model.get_parameter(f"{name}.mlp.fc1.bias").copy_(-sharp * steps)
        second = model.get_parameter(f"{name}.mlp.fc2.weight")
        second.copy_(quiet * torch.randn(width, generator=coin)[:, None].expand_as(second))


@torch.no_grad()
def blended(model: nn.Module, share: float, tamper: Callable[[nn.Module], None]) -> None:
    """Only ``share`` of the way from the honest weights to the tampered ones."""
    honest = {name: parameter.clone() for name, parameter in model.named_parameters()}
    tamper(model)
    for name, parameter in model.named_parameters():
        parameter.lerp_(honest[name], 1 - share)


def head_of(model: nn.Module) -> nn.Linear:
    head = model.get_submodule(head_names(model)[0].rpartition(".")[0])
    assert isinstance(head, nn.Linear)
    return head

"""PRECODE (Scheliga et al. 2022): a variational bottleneck before the head.

An encoder makes mean and deviation of a short code out of the features, a code is drawn, and a
decoder makes features of it again; the loss grows by the code's divergence from a standard normal
one. The draw is the client's: without it no gradient of the head can be computed again. Known to be
broken: Balunovic et al. 2022 and the authors themselves (Scheliga et al. 2023) leave out what the
draw reaches first. Derived here: behind one picture the draw is simply *read*. Encoder and decoder
are linear, so  dW = db x^T  gives what each of them read, that is the features and the code, and
mean and deviation are what the encoder, which is known, says of the features. Closed forms on the
patches do not care what comes behind them at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.anatomy import head_names
from fedsim.core.defense import Defense, Informed
from fedsim.core.errors import ModelError
from fedsim.defenses.dice import Before, Dice, head_of, refuse_adapted_head

MODULE = "precode"
_ALONE = 1e-3  # relative: how far the update of a layer may be from that of one picture


@dataclass(frozen=True)
class Precode(Defense):
    """``size``: of the code; ``beta``: the weight of its divergence. Both are those of the authors'
    code, and so are the softplus on the deviation and the divergence in bits. Codes are drawn by
    clients while they learn, whatever ``train.mode`` says; everybody else, and the evaluation,
    takes the mean (their code draws there as well)."""

    size: Annotated[int, Field(ge=1)] = 256
    beta: Annotated[float, Field(ge=0)] = 1e-3

    def prepare_model(self, model: nn.Module) -> nn.Module:
        head, names = head_of(model, "precode"), head_names(model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            bottleneck = Bottleneck(head.in_features, self.size, self.beta)
        # A chain of layers would run it a second time: there it stands inside the head.
        owner = head if isinstance(model, nn.Sequential) else model
        owner.add_module(MODULE, bottleneck.to(head.weight))
        if head_names(model) != names:
            raise ModelError(
                f"precode cannot be added: the head of a {type(model).__name__} is found by its "
                f"place, which the bottleneck would take; give the model a get_classifier()."
            )
        head.register_forward_pre_hook(Before(bottleneck))
        return model

    def check_trained(self, model: nn.Module) -> None:
        refuse_adapted_head(model, "precode")

    def toss(self, model: nn.Module, rng: torch.Generator) -> None:
        found_bottleneck(model)[1].dice.take(rng)

    def tossed(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        return found_bottleneck(model)[1].dice.proven()

    def penalty(self, model: nn.Module) -> Tensor | None:
        dice = found_bottleneck(model)[1].dice
        term, dice.beside = dice.beside, None
        return term

    def counter(self, seen: Informed, model: nn.Module) -> Informed:
        """Read the draw of one picture and match with it; of several pictures match by the mean,
        without the gradients of bottleneck and head (but for what labels are read from). The
        divergence's own gradient, beta times a little, is not simulated."""
        (place, bottleneck), tensors = found_bottleneck(model), seen.update.tensors
        noise = None if seen.masked else bottleneck.drawn(tensors, place)
        bottleneck.dice.read = noise
        if noise is not None:
            words = "precode: the client's draw is read from encoder and decoder"
            return replace(seen, notes=(*seen.notes, words))
        weight, *bias = head_names(model)
        rest = {name: t for name, t in tensors.items() if not name.startswith(f"{place}.")}
        if set(rest) <= {weight, *bias}:  # nothing before the bottleneck is trained
            return seen
        if any(name in rest for name in bias):
            rest.pop(weight, None)
        words = "precode: the client's draw cannot be told; matched by the layers before it"
        update = replace(seen.update, tensors=rest)
        return replace(seen, update=update, notes=(*seen.notes, words))


class Bottleneck(nn.Module):
    """Features (B, D) through a drawn code (B, K) to features again."""

    def __init__(self, width: int, size: int, beta: float):
        super().__init__()
        self.encoder = nn.Linear(width, 2 * size)
        self.decoder = nn.Linear(size, width)
        self.beta, self.dice = beta, Dice()

    def forward(self, features: Tensor) -> Tensor:
        mean, spread = self.told(self.encoder(features))
        noise = self.dice.read
        if self.dice.rng is not None:  # on the CPU: the same draw on every device
            noise = torch.randn(mean.shape, generator=self.dice.rng)
            self.dice.beside = self.beta * divergence(mean, spread).mean()
        code = mean if noise is None else mean + spread * noise.to(mean)
        self.dice.note(mean, code)
        decoded: Tensor = self.decoder(code)
        return decoded

    def told(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of a code."""
        mean, spread = encoded.chunk(2, dim=-1)
        return mean, F.softplus(spread)

    def drawn(self, update: Mapping[str, Tensor], place: str) -> Tensor | None:
        """What a client drew (K,), from the update of one picture; None where it is not that.
        ``place``: this module's name."""
        features, code = (_read_by(update, f"{place}.{layer}") for layer in ("encoder", "decoder"))
        if features is None or code is None:
            return None
        weight, bias = (p.detach().double().cpu() for p in self.encoder.parameters())
        mean, spread = self.told(weight @ features + bias)
        return ((code - mean) / spread).to(self.encoder.weight)


def divergence(mean: Tensor, spread: Tensor) -> Tensor:
    """Of codes from a standard normal one, in bits, (B,)."""
    return (mean.square() + spread.square() - 1 - 2 * spread.log()).sum(-1) / (2 * math.log(2))


def found_bottleneck(model: nn.Module) -> tuple[str, Bottleneck]:
    """The module that `Precode.prepare_model` gave the model, and its name."""
    return next((n, m) for n, m in model.named_modules() if isinstance(m, Bottleneck))


def _read_by(update: Mapping[str, Tensor], layer: str) -> Tensor | None:
    """What a linear layer read: x of  dW = db x^T,  where one picture is behind it."""
    weight, bias = (update.get(f"{layer}.{part}") for part in ("weight", "bias"))
    if weight is None or bias is None or not bool(bias.any()):
        return None
    weight, bias = weight.detach().double().cpu(), bias.detach().double().cpu()
    x = weight.T @ bias / (bias @ bias)
    alone = float((weight - torch.outer(bias, x)).norm()) <= _ALONE * float(weight.norm())
    return x if alone and bool(torch.isfinite(x).all()) else None

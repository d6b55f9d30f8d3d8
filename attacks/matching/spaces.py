"""Spaces: what a matching attack searches, as a parametrisation of normalised images.

Pixels; latents of a generator; the weights of a generator, a copy for each image. Every variable
has a leading dimension of seeds, so that several starts are searched side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedsim.attacks.generators import generate

Normalise = Callable[[Tensor], Tensor]  # pixels in [0, 1] to what the model sees


class Parametrisation(Protocol):
    """Images as a function of what is searched."""

    variables: list[Tensor]  # leaves, with a leading dimension of seeds each

    def images(self) -> Tensor:
        """Normalised images (S, B, 3, H, W), differentiable in the variables."""
        ...

    def constrain(self) -> None:
        """Bring the variables back to where they make sense; called after every step."""
        ...

    def penalty(self) -> Tensor | None:
        """A prior on the variables themselves, (S,), where there is one."""
        ...


@dataclass
class Pixels:
    """The images themselves, kept between black and white where ``boxed``.

    ``grey`` searches one channel that all three share.
    """

    start: Tensor  # (S, B, 3, H, W), normalised
    low: Tensor  # black and white after normalisation, (3, 1, 1)
    high: Tensor
    boxed: bool = True
    grey: bool = False

    def __post_init__(self) -> None:
        start = self.start.detach().clone()
        if self.grey:  # in pixels, because the channels may be normalised differently
            start = ((start - self.low) / (self.high - self.low)).mean(2, keepdim=True)
        self.variables = [start.requires_grad_(True)]

    def images(self) -> Tensor:
        if not self.grey:
            return self.variables[0]
        return self.variables[0] * (self.high - self.low) + self.low

    def constrain(self) -> None:
        if not self.boxed:
            return
        with torch.no_grad():
            pixels = self.variables[0]
            bounded = pixels.clamp(0, 1) if self.grey else pixels.clamp(self.low, self.high)
            pixels.copy_(bounded)

    def penalty(self) -> Tensor | None:
        return None


@dataclass
class Latents:
    """What a generator with fixed weights can make; ``weight`` pulls latents to ``centre``."""

    generator: nn.Module
    start: Tensor  # (S, B, *latents)
    labels: Tensor  # (S, B), for a conditional generator
    normalise: Normalise
    centre: Tensor
    weight: float = 0.0

    def __post_init__(self) -> None:
        self.variables = [self.start.detach().clone().requires_grad_(True)]

    def images(self) -> Tensor:
        latents = self.variables[0]
        made = generate(self.generator, latents.flatten(0, 1), self.labels.flatten())
        return self.normalise(made).unflatten(0, latents.shape[:2])

    def constrain(self) -> None:
        """Latents may be anywhere."""

    def penalty(self) -> Tensor | None:
        if self.weight == 0:
            return None
        apart = (self.variables[0] - self.centre).flatten(2)
        return self.weight * apart.square().sum(2).mean(1)


@dataclass
class Weights:
    """A generator's weights, a copy for each image, with the latents fixed."""

    generator: nn.Module
    latents: Tensor  # (S, B, *latents)
    labels: Tensor  # (S, B)
    normalise: Normalise

    def __post_init__(self) -> None:
        seeds, batch = self.latents.shape[:2]
        self.names = [name for name, _ in self.generator.named_parameters()]
        self.variables = [
            p.detach().expand(seeds, batch, *p.shape).clone().requires_grad_(True)
            for p in self.generator.parameters()
        ]

    def images(self) -> Tensor:
        latents, labels = self.latents.flatten(0, 1), self.labels.flatten()
        copies = [variable.flatten(0, 1) for variable in self.variables]
        made = vmap(self._one)(copies, latents, labels)
        return self.normalise(made).unflatten(0, self.latents.shape[:2])

    def _one(self, weights: list[Tensor], latents: Tensor, labels: Tensor) -> Tensor:
        named = dict(zip(self.names, weights, strict=True))
        made: Tensor = functional_call(_Made(self.generator), _prefixed(named), (latents, labels))
        return made

    def constrain(self) -> None:
        """Weights may be anything."""

    def penalty(self) -> Tensor | None:
        return None


class _Made(nn.Module):
    """One image of a generator, as a module whose weights can be replaced."""

    def __init__(self, generator: nn.Module):
        super().__init__()
        self.generator = generator

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        return generate(self.generator, latents[None], labels[None])[0]


def _prefixed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"generator.{name}": tensor for name, tensor in weights.items()}

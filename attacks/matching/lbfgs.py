"""L-BFGS with a line search, asked for one point after the other.

A step of the search is one evaluation of the loss and its gradient. `Lbfgs` is told what was found
at the point it proposed and proposes the next: along the quasi-Newton direction if the loss fell
enough (Armijo's condition, on the move that the box left of the step), and half as far along the
same direction if not. Where halving does not help, it forgets its curvature, looks at the accepted
point once more (the loss may have moved) and begins again with the steepest descent. So the loss at
accepted points never rises, and the last of them is the best.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

MEMORY = 20  # pairs of moves and changes of the gradient
ENOUGH = 1e-4  # of the fall that the gradient promises
HALVINGS = 12
CURVED = 1e-10  # a pair with less curvature, by its sizes, is noise
FIRST = 0.1  # the mean change of a number in the first step, times the rate


@dataclass
class Lbfgs:
    """The descent of one seed, over one flat vector of all that is searched. ``rate``: how far the
    first step goes, and the first after a restart."""

    rate: float = 1.0
    point: Tensor | None = None  # the last point that was accepted
    restarts: int = 0
    _value: float = float("inf")
    _gradient: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    _direction: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    _step: float = 1.0
    _halvings: int = 0
    _again: bool = False  # whether the accepted point is looked at once more
    _pairs: deque[tuple[Tensor, Tensor]] = field(default_factory=lambda: deque(maxlen=MEMORY))

    def next(self, point: Tensor, value: float, gradient: Tensor, free: Tensor) -> Tensor:
        """Where to look next, after ``value`` and ``gradient`` (N,) were found at ``point`` (N,),
        which is what the box left of the last proposal. ``free``: the numbers that may still follow
        the negative gradient without leaving the box."""
        if self.point is None or self._again:
            self._again = False
            self._accept(point, value, gradient)
        elif self._fell(point, value):
            move, change = point - self.point, gradient - self._gradient
            sizes = float(move.norm() * change.norm())
            if sizes > 0 and float(move @ change) > CURVED * sizes:
                self._pairs.append((move, change))
            self._accept(point, value, gradient)
        elif self._halvings < HALVINGS:
            self._halvings += 1
            self._step /= 2
            return self._proposal()
        else:
            self.restarts += 1
            self._pairs.clear()
            self._again = True
            return self.point.clone()
        self._turn(gradient, free)
        return self._proposal()

    def _fell(self, point: Tensor, value: float) -> bool:
        assert self.point is not None
        promised = float(self._gradient @ (point - self.point))
        return promised < 0 and value <= self._value + ENOUGH * promised

    def _accept(self, point: Tensor, value: float, gradient: Tensor) -> None:
        self.point, self._value, self._gradient = point.clone(), value, gradient.clone()

    def _turn(self, gradient: Tensor, free: Tensor) -> None:
        """Choose a direction from the accepted point."""
        downhill = -gradient * free
        direction = self._newton(downhill) * free
        if float(direction @ downhill) <= 0:
            self._pairs.clear()
            direction = downhill
        self._direction, self._step, self._halvings = direction, 1.0, 0
        if not self._pairs:  # the gradient's size says nothing about how far to go
            self._step = self.rate * FIRST / max(float(direction.abs().mean()), 1e-30)

    def _newton(self, downhill: Tensor) -> Tensor:
        """The two loops over what is remembered."""
        direction, weights = downhill.clone(), []
        for move, change in reversed(self._pairs):
            weight = (move @ direction) / (move @ change)
            direction -= weight * change
            weights.append(weight)
        if self._pairs:
            move, change = self._pairs[-1]
            direction *= (move @ change) / (change @ change)
        for (move, change), weight in zip(self._pairs, reversed(weights), strict=True):
            direction += (weight - (change @ direction) / (move @ change)) * move
        return direction

    def _proposal(self) -> Tensor:
        assert self.point is not None
        return self.point + self._step * self._direction

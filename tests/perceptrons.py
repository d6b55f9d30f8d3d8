"""Networks that begin with a linear layer, written in different ways."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Perceptron(nn.Module):
    """One hidden layer: each of those below does something else behind it."""

    def __init__(self, num_classes: int = 8, image_size: int = 16, hidden: int = 300):
        super().__init__()
        self.first = nn.Linear(3 * image_size**2, hidden)
        self.out = nn.Linear(hidden, num_classes)
        self.between = self.module(hidden)

    def module(self, hidden: int) -> nn.Module:
        return nn.ReLU()

    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.between(self.first(self.flat(x))))


class CalledRelu(Perceptron):
    """Nobody declared its ReLU, and it reads channels last."""

    def flat(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).reshape(len(x), -1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.first(self.flat(x))))


class InPlaceRelu(Perceptron):
    def module(self, hidden: int) -> nn.Module:
        return nn.ReLU(inplace=True)


class NormedMlp(Perceptron):
    def module(self, hidden: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(hidden), nn.ReLU())


class NormedBehind(Perceptron):
    """What comes behind the ReLU mixes the batch."""

    def module(self, hidden: int) -> nn.Module:
        return nn.Sequential(nn.ReLU(), nn.BatchNorm1d(hidden))


class DroppedMlp(Perceptron):
    def module(self, hidden: int) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.3), nn.ReLU())


class Noisy(Perceptron):
    """Its first layer reads a picture with noise on it, while it is trained."""

    def flat(self, x: Tensor) -> Tensor:
        return (x + 0.1 * torch.randn_like(x) if self.training else x).flatten(1)


class WeightsComputed(Perceptron):
    """The weights of its first layer are made of others."""

    def __init__(self, num_classes: int = 8, image_size: int = 16, hidden: int = 300):
        super().__init__(num_classes, image_size, hidden)
        self.first = nn.utils.parametrizations.weight_norm(self.first)


class Patchwise(Perceptron):
    """Its linear layer reads patches."""

    def __init__(self, num_classes: int = 8, image_size: int = 16, hidden: int = 300):
        super().__init__(num_classes, image_size, hidden)
        self.first = nn.Linear(3 * 64, hidden)

    def flat(self, x: Tensor) -> Tensor:
        return F.unfold(x, 8, stride=8).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)

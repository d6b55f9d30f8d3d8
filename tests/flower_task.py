"""The `task` module of an app like those in tutorials: two models, their training, their data."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SIDE, CLASSES = 16, 10
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


class Net(nn.Module):
    """A small CNN with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.bn = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1, stride=2)
        self.fc = nn.Linear(8 * (SIDE // 2) ** 2, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        seen = torch.relu(self.bn(self.conv1(images)))
        logits: Tensor = self.fc(torch.relu(self.conv2(seen)).flatten(1))
        return logits


class Plain(nn.Module):
    """One without."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, stride=2)
        self.fc = nn.Linear(width * (SIDE // 2) ** 2, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(torch.sigmoid(self.conv(images)).flatten(1))
        return logits


def pictures(client: int, count: int) -> tuple[Tensor, Tensor]:
    """Pictures in bytes and their labels; the same for the same client."""
    coin = torch.Generator().manual_seed(100 + client)
    coarse = torch.rand(count, 3, 4, 4, generator=coin)
    smooth = nn.functional.interpolate(coarse, (SIDE, SIDE), mode="bilinear")
    return (smooth * 255).round().byte(), torch.randint(0, CLASSES, (count,), generator=coin)


def normalised(images: Tensor) -> Tensor:
    """Bytes as torchvision's ToTensor and Normalize make of them."""
    shape = (1, 3, 1, 1)
    return (
        (images.float() / 255)
        .sub(torch.tensor(MEAN).view(shape))
        .div(torch.tensor(STD).view(shape))
    )


def loader(client: int, count: int, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    images, labels = pictures(client, count)
    coin = torch.Generator().manual_seed(client)
    data = TensorDataset(normalised(images), labels)
    return DataLoader(data, batch_size=batch_size, shuffle=True, generator=coin)


def train(model, batches, epochs: int, lr: float, momentum: float = 0.0) -> float:
    """As tutorials do it."""
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=lr, momentum=momentum
    )
    loss_of, running = nn.CrossEntropyLoss(), 0.0
    model.train()
    for _ in range(epochs):
        for batch in batches:
            images, labels = (
                (batch["img"], batch["label"]) if isinstance(batch, dict) else (batch[0], batch[1])
            )
            optimizer.zero_grad()
            loss = loss_of(model(images), labels)
            loss.backward()
            optimizer.step()
            running += loss.item()
    return running

"""The model, the pictures, and how the one learns from the others."""

import random
from functools import cache
from pathlib import Path

import skimage
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.transforms import Compose, Normalize, Resize, ToTensor

IMAGE_SIZE = 32
MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
PHOTOGRAPHS = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "rocket.jpg",
    "retina.jpg",
    "ihc.png",
    "hubble_deep_field.jpg",
    "motorcycle_left.png",
)
CROPS_PER_CLIENT = 64
TEST_CROPS = 64


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """A vision transformer of the usual kind."""

    def __init__(self, dim: int = 96, depth: int = 4, heads: int = 4, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        places = 1 + (IMAGE_SIZE // patch) ** 2
        self.positions = nn.Parameter(0.02 * torch.randn(1, places, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, len(PHOTOGRAPHS))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], dim=1)
        x = x + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class Crops(Dataset):
    """Square crops of photographs; which photograph one is of is its class."""

    transform = Compose([Resize((IMAGE_SIZE, IMAGE_SIZE)), ToTensor(), Normalize(MEAN, STD)])

    def __init__(self, name: str, count: int) -> None:
        self.boxes = []
        draw = random.Random(name)
        for _ in range(count):
            label = draw.randrange(len(PHOTOGRAPHS))
            width, height = photograph(label).size
            side = draw.randint(min(width, height) // 2, min(width, height))
            left, top = draw.randint(0, width - side), draw.randint(0, height - side)
            self.boxes.append((label, (left, top, left + side, top + side)))

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label, box = self.boxes[index]
        return self.transform(photograph(label).crop(box)), label


@cache
def photograph(label: int) -> Image.Image:
    folder = Path(skimage.__file__).parent / "data"
    return Image.open(folder / PHOTOGRAPHS[label]).convert("RGB")


def load_data(partition_id: int, server_round: int, count: int, batch_size: int) -> DataLoader:
    """The ``count`` pictures that a client took since the last round."""
    crops = Crops(f"client {partition_id}", CROPS_PER_CLIENT)
    first = (server_round - 1) * count
    recent = Subset(crops, [i % len(crops) for i in range(first, first + count)])
    return DataLoader(recent, batch_size=batch_size, shuffle=True)


def load_test_data(batch_size: int = 32) -> DataLoader:
    return DataLoader(Crops("test", TEST_CROPS), batch_size=batch_size)


def train(net: nn.Module, trainloader: DataLoader, epochs: int, lr: float) -> float:
    """Plain SGD; the mean loss of all batches."""
    net.train()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    losses = []
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def test(net: nn.Module, testloader: DataLoader) -> tuple[float, float]:
    """The mean loss and the accuracy."""
    net.eval()
    total, right, seen = 0.0, 0, 0
    for images, labels in testloader:
        logits = net(images)
        total += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        right += (logits.argmax(1) == labels).sum().item()
        seen += len(labels)
    return total / seen, right / seen

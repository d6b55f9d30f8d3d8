"""Networks as people write them, who have never heard of timm or of fedsim."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TutorialViT(nn.Module):
    """Patches cut by hand and projected by a linear layer, zeros for positions or numbers of the
    size ``places``, and an encoder of torch's own."""

    def __init__(
        self, num_classes: int = 10, image_size: int = 32, patch: int = 8, dim: int = 64,
        depth: int = 2, norm_first: bool = True, batch_first: bool = True, places: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        self.patch, self.batch_first = patch, batch_first
        self.to_logits = nn.Linear(dim, num_classes)  # written before what it follows
        self.embed = nn.Linear(3 * patch * patch, dim)
        self.first = nn.Parameter(torch.zeros(1, 1, dim))
        self.where = nn.Parameter(places * torch.randn(1, (image_size // patch) ** 2 + 1, dim))
        layer = nn.TransformerEncoderLayer(
            dim, 4, 2 * dim, dropout=0.0, batch_first=batch_first, norm_first=norm_first
        )
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, images: Tensor) -> Tensor:
        count, p = len(images), self.patch
        patches = images.unfold(2, p, p).unfold(3, p, p)  # (B, 3, rows, columns, p, p)
        patches = patches.permute(0, 2, 3, 4, 5, 1).reshape(count, -1, 3 * p * p)  # colours last
        tokens = torch.cat([self.first.expand(count, -1, -1), self.embed(patches)], 1) + self.where
        if not self.batch_first:
            tokens = tokens.transpose(0, 1)
        seen = self.body(tokens)
        return self.to_logits(seen[:, 0] if self.batch_first else seen[0])


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.to_q(x), self.to_kv(x).chunk(2, -1)
        split = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v)]
        seen = nn.functional.scaled_dot_product_attention(*split)
        return self.out(seen.transpose(1, 2).flatten(2))


class HandWrittenViT(nn.Module):
    """A convolution for patches, a table of positions looked up by number, lists of layers, the
    mean of all tokens."""

    def __init__(self, classes: int = 10, size: int = 32, dim: int = 48, depth: int = 2):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, dim, 8, 8), nn.Flatten(2))
        self.table = nn.Embedding((size // 8) ** 2, dim)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.Sequential(nn.LayerNorm(dim), Attention(dim, 4)),
                    nn.Sequential(
                        nn.LayerNorm(dim),
                        nn.Linear(dim, 2 * dim),
                        nn.GELU(),
                        nn.Linear(2 * dim, dim),
                    ),
                ]
            )
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.stem(images).transpose(1, 2)
        tokens = tokens + self.table(torch.arange(tokens.shape[1], device=images.device))
        for attention, mlp in self.layers:
            tokens = tokens + attention(tokens)
            tokens = tokens + mlp(tokens)
        return self.head(self.norm(tokens).mean(1))


class Net(nn.Module):
    """The CNN of torch's first tutorial, in Flower's quickstart as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.pool = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))


def as_configured(num_classes: int, **kwargs: int) -> nn.Module:
    """A factory that takes more than it names."""
    return TutorialViT(num_classes, **kwargs)


def of_no_use() -> nn.Module:
    raise RuntimeError("no weights in the cupboard")


def as_numbers() -> list[int]:
    return [1, 2, 3]

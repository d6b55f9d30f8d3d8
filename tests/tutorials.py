"""Networks as people write them, who have never heard of timm or of fedsim."""

from __future__ import annotations

from typing import NamedTuple

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


class Chain(nn.Module):
    """Convolution and linear layer with what stands between them in `forward` alone, layers that
    wait for their first input, noise that is no weight, and the logarithm of a softmax."""

    def __init__(self, num_classes: int = 10, drop: float = 0.0):
        super().__init__()
        self.drop = drop
        self.seen, self.told = nn.LazyConv2d(8, 3, stride=2), nn.LazyLinear(num_classes)
        self.register_buffer("noise", torch.randn(8, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(torch.tanh(self.seen(x) + self.noise), self.drop, self.training)
        return torch.log_softmax(self.told(x.flatten(1)), 1)


class Shared(HandWrittenViT):
    """One block, twice."""

    def __init__(self, classes: int = 10, size: int = 32):
        super().__init__(classes, size)
        self.layers = nn.ModuleList([self.layers[0], self.layers[0]])


class Outputs(NamedTuple):
    logits: Tensor
    aux_logits: Tensor


class WithHelp(nn.Module):
    """A head more while it is trained, as in torchvision's Inception: by name, or not."""

    def __init__(self, num_classes: int = 10, named: bool = True):
        super().__init__()
        self.named = named
        self.head, self.helper = (nn.Linear(3 * 32 * 32, num_classes) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        logits, more = self.head(x.flatten(1)), self.helper(x.flatten(1))
        if not self.training:
            return logits
        return Outputs(logits, more) if self.named else (logits, more)


class TwoHeads(HandWrittenViT):
    """The mean of two heads, as in a distilled DeiT."""

    def __init__(self, classes: int = 10, size: int = 32):
        super().__init__(classes, size)
        self.other = nn.Linear(48, classes)

    def forward(self, images: Tensor) -> Tensor:
        seen: list[Tensor] = []
        hook = self.norm.register_forward_hook(lambda _, given, gave: seen.append(gave.mean(1)))
        logits = super().forward(images)
        hook.remove()
        return (logits + self.other(seen[0])) / 2


class Grey(nn.Module):
    def __init__(self, num_classes: int = 10, in_channels: int = 1):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(in_channels, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(4, num_classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def net_for(num_classes: int) -> nn.Module:
    """The tutorial's CNN for other data."""
    model = Net()
    model.fc3 = nn.Linear(84, num_classes)
    return model


def as_configured(num_classes: int, **kwargs: int) -> nn.Module:
    """A factory that takes more than it names."""
    return TutorialViT(num_classes, **kwargs)


def of_no_use() -> nn.Module:
    raise RuntimeError("no weights in the cupboard")


def as_numbers() -> list[int]:
    return [1, 2, 3]

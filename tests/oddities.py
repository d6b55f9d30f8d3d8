"""Networks that are odd in one way each, as strangers bring them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention and MLP, with torch's own attention."""

    def __init__(self, dim: int, heads: int = 4, norm: Callable[[int], nn.Module] = nn.LayerNorm):
        super().__init__()
        self.before, self.between = norm(dim), norm(dim)
        self.mix = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.before(x)
        x = x + self.mix(seen, seen, seen, need_weights=False)[0]
        return x + self.mlp(self.between(x))


class Plain(nn.Module):
    """A small ViT: every oddity below changes one thing of it."""

    def __init__(self, num_classes: int = 8, image_size: int = 32, dim: int = 64, patch: int = 8):
        super().__init__()
        self.side, self.dim, self.classes = image_size // patch, dim, num_classes
        self.cut = nn.Conv2d(3, dim, patch, patch)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.places = nn.Parameter(0.02 * torch.randn(1, self.side**2 + 1, dim))
        self.stack = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def patches(self, x: Tensor) -> Tensor:
        return self.cut(x).flatten(2).transpose(1, 2)

    def embed(self, x: Tensor) -> Tensor:
        first = self.token.expand(len(x), -1, -1)
        return torch.cat([first, self.patches(x)], 1) + self.places

    def run(self, tokens: Tensor) -> Tensor:
        for block in self.stack:
            tokens = block(tokens)
        return self.norm(tokens)

    def pool(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0]

    def forward(self, x: Tensor):
        return self.out(self.pool(self.run(self.embed(x))))


class ConvStem(Plain):
    """Overlapping convolutions in the place of patches."""

    def __init__(self, **options: int):
        super().__init__(**options)
        self.cut = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, self.dim, 4, 4),
        )  # fmt: skip


class PatchStem(Plain):
    """Patches first, then more convolutions before the positions."""

    def __init__(self, **options: int):
        super().__init__(**options)
        self.cut = nn.Sequential(
            nn.Conv2d(3, self.dim, 8, 8), nn.GELU(), nn.Conv2d(self.dim, self.dim, 3, 1, 1)
        )


class Registers(Plain):
    """Class token and four registers, all put before patches that have their positions already."""

    def __init__(self, **options: int):
        super().__init__(**options)
        self.registers = nn.Parameter(0.02 * torch.randn(1, 4, self.dim))
        self.places = nn.Parameter(0.02 * torch.randn(1, self.side**2, self.dim))

    def embed(self, x: Tensor) -> Tensor:
        more = [t.expand(len(x), -1, -1) for t in (self.token, self.registers)]
        return torch.cat([*more, self.patches(x) + self.places], 1)


class RegistersFixed(Registers):
    """The same with positions that nobody trains."""

    def __init__(self, **options: int):
        super().__init__(**options)
        self.places.requires_grad_(False)
        nn.init.normal_(self.places)


class MeanPooled(Plain):
    def pool(self, tokens: Tensor) -> Tensor:
        return tokens.mean(1)


class TwoAxes(Plain):
    """A position for each row and one for each column."""

    def __init__(self, **options: int):
        super().__init__(**options)
        del self.places
        self.down = nn.Parameter(0.02 * torch.randn(self.side, 1, self.dim))
        self.across = nn.Parameter(0.02 * torch.randn(1, self.side, self.dim))

    def embed(self, x: Tensor) -> Tensor:
        return self.patches(x) + (self.down + self.across).flatten(0, 1)


class Grid(Plain):
    """Positions kept as a picture, (1, D, rows, columns)."""

    def __init__(self, **options: int):
        super().__init__(**options)
        self.places = nn.Parameter(0.02 * torch.randn(1, self.dim, self.side, self.side))

    def embed(self, x: Tensor) -> Tensor:
        return (self.cut(x) + self.places).flatten(2).transpose(1, 2)


def waves(count: int, dim: int) -> Tensor:
    at = torch.arange(count)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
    return torch.stack([at.sin(), at.cos()], 2).flatten(1)


class Waves(Plain):
    """A buffer of sines, (T, 1, D), and tokens first."""

    def __init__(self, **options: int):
        super().__init__(**options)
        del self.places
        self.register_buffer("pe", waves(200, self.dim)[:, None])

    def embed(self, x: Tensor) -> Tensor:
        first = self.token.expand(len(x), -1, -1)
        tokens = torch.cat([first, self.patches(x)], 1).transpose(0, 1)
        return (tokens + self.pe[: len(tokens)]).transpose(0, 1)


class WavesInForward(Plain):
    """Sines that are computed anew in every pass."""

    def embed(self, x: Tensor) -> Tensor:
        tokens = self.patches(x)
        return tokens + waves(tokens.shape[1], self.dim).to(x)


class Long(Plain):
    """More positions than there are tokens."""

    def __init__(self, **options: int):
        super().__init__(**options)
        self.places = nn.Parameter(0.02 * torch.randn(1, 50, self.dim))

    def embed(self, x: Tensor) -> Tensor:
        first = self.token.expand(len(x), -1, -1)
        tokens = torch.cat([first, self.patches(x)], 1)
        return tokens + self.places[:, : tokens.shape[1]]


class InPlace(Plain):
    """Positions added to what the projection gave, in its own place."""

    def embed(self, x: Tensor) -> Tensor:
        tokens = self.patches(x)
        tokens += self.places[:, 1:]
        return tokens


class NoBias(Plain):
    def __init__(self, **options: int):
        super().__init__(**options)
        self.cut = nn.Conv2d(3, self.dim, 8, 8, bias=False)


class Unfolded(Plain):
    """Patches by `unfold`, a linear layer, and the class token last."""

    def __init__(self, **options: int):
        super().__init__(**options)
        self.cut = nn.Linear(3 * 64, self.dim)

    def patches(self, x: Tensor) -> Tensor:
        return self.cut(F.unfold(x, 8, stride=8).transpose(1, 2))


class TokenLast(Plain):
    def embed(self, x: Tensor) -> Tensor:
        last = self.token.expand(len(x), -1, -1)
        return torch.cat([self.patches(x), last], 1) + self.places

    def pool(self, tokens: Tensor) -> Tensor:
        return tokens[:, -1]


class Scaled(Plain):
    """Tokens times the root of their width, as in the first transformer."""

    def patches(self, x: Tensor) -> Tensor:
        return super().patches(x) * math.sqrt(self.dim)


class Gained(Plain):
    """A gain that begins as one."""

    def __init__(self, **options: int):
        super().__init__(**options)
        self.gain = nn.Parameter(torch.ones(1))

    def patches(self, x: Tensor) -> Tensor:
        return super().patches(x) * self.gain


class Everywhere(Plain):
    """Positions added before every block."""

    def run(self, tokens: Tensor) -> Tensor:
        for block in self.stack:
            tokens = block(tokens) + self.places
        return self.norm(tokens)


class Columns(Plain):
    """Every second column of patches turned over: the projection used twice."""

    def patches(self, x: Tensor) -> Tensor:
        return super().patches(x) + super().patches(x.flip(-1))


class PostNorm(Plain):
    def __init__(self, batch_first: bool = True, norm_first: bool = False, **options: int):
        super().__init__(**options)
        layer = nn.TransformerEncoderLayer(
            self.dim, 4, 96, 0.0, batch_first=batch_first, norm_first=norm_first
        )
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.batch_first = batch_first

    def run(self, tokens: Tensor) -> Tensor:
        if not self.batch_first:
            return self.stack(tokens.transpose(0, 1)).transpose(0, 1)
        return self.stack(tokens)


class ByEinsum(nn.Module):
    """Attention of parameters alone, without one layer."""

    def __init__(self, dim: int, heads: int = 4):
        super().__init__()
        self.wq, self.wk, self.wv = (
            nn.Parameter(torch.randn(dim, heads, dim // heads) / dim**0.5) for _ in range(3)
        )
        self.wo = nn.Parameter(torch.randn(heads, dim // heads, dim) / dim**0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bnd,dhe->bhne", x, w) for w in (self.wq, self.wk, self.wv))
        seen = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        return torch.einsum("bhne,hed->bnd", seen, self.wo)


class EinsumBlock(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(dim), ByEinsum(dim)
        self.after, self.mlp = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.mlp(self.after(x)).tanh()


class Einsum(Plain):
    def __init__(self, **options: int):
        super().__init__(**options)
        self.stack = nn.ModuleList(EinsumBlock(self.dim) for _ in range(2))


class RootNorm(Plain):
    def __init__(self, **options: int):
        super().__init__(**options)
        self.stack = nn.ModuleList(Block(self.dim, norm=nn.RMSNorm) for _ in range(2))


class WideNorm(Plain):
    """A norm over all tokens at once."""

    def __init__(self, **options: int):
        super().__init__(**options)
        shape = (self.side**2 + 1, self.dim)
        self.stack = nn.ModuleList(
            Block(self.dim, norm=lambda _: nn.LayerNorm(shape)) for _ in range(2)
        )


class KeepsMaps(Plain):
    """Keeps what it saw, for pictures of it."""

    def run(self, tokens: Tensor) -> Tensor:
        self.seen = super().run(tokens)
        return self.seen


class WeightNormed(Plain):
    def __init__(self, **options: int):
        super().__init__(**options)
        nn.utils.parametrizations.weight_norm(self.out)


class OldWeightNorm(Plain):
    def __init__(self, **options: int):
        super().__init__(**options)
        nn.utils.weight_norm(self.out)


class NormedPatches(Plain):
    def __init__(self, **options: int):
        super().__init__(**options)
        nn.utils.parametrizations.weight_norm(self.cut)


class HeadWithoutBias(Plain):
    def __init__(self, **options: int):
        super().__init__(**options)
        self.out = nn.Linear(self.dim, self.classes, bias=False)


class TiedHead(Plain):
    """Queries of classes, which are also the head's weights."""

    def __init__(self, **options: int):
        super().__init__(**options)
        self.asked = nn.Parameter(0.1 * torch.randn(self.classes, self.dim))
        del self.out
        self.out = nn.Linear(self.dim, self.classes)
        self.out.weight = self.asked

    def embed(self, x: Tensor) -> Tensor:
        tokens = super().embed(x)
        return tokens + 3 * (tokens @ self.asked.T).softmax(-1) @ self.asked


class TiedElsewhere(Plain):
    """A second name of the head's weight comes first, and nothing else uses it."""

    def __init__(self, **options: int):
        super().__init__(**options)
        self.out.weight = self.alias = nn.Parameter(self.out.weight.detach().clone())


class CentredLogits(Plain):
    """Logits that a norm without numbers of its own goes over."""

    def __init__(self, **options: int):
        super().__init__(**options)
        self.last = nn.BatchNorm1d(self.classes, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x))


class Cold(Plain):
    """Logits over a temperature."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 0.1


class ColdInPlace(Plain):
    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        logits /= 0.1
        return logits


class Probabilities(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(1)


class Dictionary(Plain):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(x), "more": x}


class Odd(Plain):
    """A dictionary without logits."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": super().forward(x)}


@dataclass
class Answer:
    logits: Tensor
    features: Tensor


class Answers(Plain):
    def forward(self, x: Tensor) -> Answer:
        return Answer(super().forward(x), x)


class Two(Plain):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


class Unused(Plain):
    """Parameters that no pass uses."""

    def __init__(self, **options: int):
        super().__init__(**options)
        self.spare = nn.Linear(self.dim, self.dim)
        self.lone = nn.Parameter(torch.zeros(()))


class Buffered(Plain):
    """Buffers of all types, and a state that is no tensor."""

    def __init__(self, extra: bool = False, **options: int):
        super().__init__(**options)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(self.side**2 + 1, dtype=torch.bool))
        self.register_buffer("fine", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("bytes", torch.arange(4, dtype=torch.uint8))
        self.register_buffer("nothing", None)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Stateful(Plain):
    """A state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state["version"] == 1


class Needy(Plain):
    def __init__(self, width: int, *, num_classes: int, image_size: int):
        super().__init__(num_classes=num_classes, image_size=image_size, dim=width)


class LayerDrop(Plain):
    """Leaves a block out for the whole batch, seldom."""

    def run(self, tokens: Tensor) -> Tensor:
        for block in self.stack:
            if not self.training or float(torch.rand(())) > 0.3:
                tokens = block(tokens)
        return self.norm(tokens)


class SeldomDrop(Plain):
    """Leaves a block out for a picture, once in fifty times."""

    def run(self, tokens: Tensor) -> Tensor:
        for block in self.stack:
            kept = torch.rand(len(tokens), 1, 1) > 0.02 if self.training else 1.0
            tokens = tokens + (block(tokens) - tokens) * kept
        return self.norm(tokens)


class PythonsCoin(Plain):
    """A coin of Python's own, for the whole batch."""

    def run(self, tokens: Tensor) -> Tensor:
        kept = not self.training or random.random() > 0.01
        return super().run(tokens) if kept else tokens


class TwoHeadedCnn(nn.Module):
    """Two linear heads, of which one counts."""

    def __init__(self, num_classes: int = 8):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.Sigmoid(),
            nn.Conv2d(16, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.Sigmoid(), nn.Flatten(),
        )  # fmt: skip
        self.kopf, self.other = nn.Linear(1024, num_classes), nn.Linear(1024, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.body(x)
        return self.kopf(seen) + 0 * self.other(seen)


class Cosine(nn.Module):
    """A head that looks at angles."""

    def __init__(self, num_classes: int = 8):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.Tanh(), nn.Flatten())
        self.prototypes = nn.Parameter(torch.randn(num_classes, 8 * 49))

    def forward(self, x: Tensor) -> Tensor:
        return 16 * F.normalize(self.body(x), dim=1) @ F.normalize(self.prototypes, dim=1).T


class ConvHead(nn.Module):
    """Classes told by a convolution, and the mean of their maps."""

    def __init__(self, num_classes: int = 8):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(inplace=True))
        self.told = nn.Conv2d(16, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.told(self.body(x)).mean((2, 3))


class Dropped(nn.Module):
    def __init__(self, num_classes: int = 8):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5),
            nn.Linear(8 * 225, num_classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Waved(nn.Module):
    """Weights that are complex numbers."""

    def __init__(self, num_classes: int = 8):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, 32, 17, dtype=torch.complex64))
        self.out = nn.Linear(3 * 32 * 32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.fft.irfft2(torch.fft.rfft2(x) * self.filter).flatten(1))


class Channelless(nn.Module):
    """Grey pictures only."""

    def __init__(self, num_classes: int = 8):
        super().__init__()
        self.out = nn.Linear(32 * 32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.view(len(x), 32 * 32))


class Frozen(Plain):
    """Everything but the head is frozen."""

    def __init__(self, **options: int):
        super().__init__(**options)
        self.requires_grad_(False)
        self.out.requires_grad_(True)

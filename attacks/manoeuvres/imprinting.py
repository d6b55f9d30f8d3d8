"""Imprinting: how the weights of a stock Vision Transformer are laid out so that its tokens can be
read from one update. The manoeuvre writes by it, the attack of the same name reads by it.

Every coordinate of a token has one task (`Layout`): pixels (DCT coefficients of the patch), a
signature of the picture, a code of the place, rulers, a constant, a balance and two that are empty.
The balance is minus the sum of all others, so LayerNorm has nothing to centre and only divides by
the token's size, which the constant tells. A ruler is a number by which tokens are sorted into
bins; it is drawn at random for every place, and moved by the patch and by the picture, so that
tokens that look alike still fall into different bins.

A row of an MLP's first layer reads one ruler against one threshold, sharply: its gradient is the
sum of delta u over the tokens u beyond the threshold, and the difference of two neighbouring rows
is what lies between (Fowl et al. 2022, "Robbing the Fed", with tokens for pictures and a hidden
layer of the network for theirs). Because a row reads one coordinate, all its others are exactly
zero: a weight delta holds them as precisely as a gradient does. One of them, the witness, has no
input but a constant, so its entry is delta itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import timm.models.vision_transformer as timm_vit
import torch
from timm.layers import DropPath, Mlp, PatchDropout
from torch import Tensor, nn

from fedsim.core.anatomy import vit_parts
from fedsim.core.errors import AttackError, ModelError, SpecError
from fedsim.core.observation import Public
from fedsim.core.trainable import adapted_layers

CONSTANT = 4.0  # of comparable size to all the rest of a token
AMPLITUDE = 0.1  # of the pixels' coefficients: a token's size then depends little on its patch
DISTANCE = 4  # of two places' codes: a mixture of two tokens is unclean in four coordinates
SIGNATURE = 6
FEWEST_PIXELS = 12  # coefficients of a patch, below which a reading is no picture
# Opponent colours: brightness, and what differs little in natural pictures.
_COLOURS = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (1.0, -2.0, 1.0))


@dataclass(frozen=True)
class Layout:
    """What each coordinate of a token holds, in plain numbers: enough to read the weights by."""

    width: int
    pixels: int
    code: int
    rulers: int
    grid: tuple[int, int]
    patch: tuple[int, int]
    normed: bool = False  # tokens pass a LayerNorm before the first block

    @classmethod
    def fitting(
        cls,
        width: int,
        grid: tuple[int, int],
        patch: tuple[int, int],
        rulers: int,
        *,
        normed: bool = False,
    ) -> Layout:
        """The layout with as many pixels as the width has room for."""
        code = len(codewords(grid[0] * grid[1])[0])
        room = width - (SIGNATURE + code + rulers + 4)
        if room < FEWEST_PIXELS:
            raise SpecError(
                f"imprint cannot work at a width of {width}: {width - room} coordinates of a token "
                f"are needed beside its pixels, and at least {FEWEST_PIXELS} for those; take a "
                f"wider model or fewer rulers."
            )
        pixels = min(room, 3 * patch[0] * patch[1])
        return cls(width, pixels, code, rulers, grid, patch, normed)

    @classmethod
    def told(cls, about: Mapping[str, Any]) -> Layout:
        """The layout that a manoeuvre's ``about`` tells."""
        try:
            numbers = {name: int(about[name]) for name in ("width", "pixels", "code", "rulers")}
            grid, patch = (tuple(map(int, about[name])) for name in ("grid", "patch"))
            (rows, columns), (p, q) = grid, patch
            normed = bool(about["normed"])
        except (KeyError, TypeError, ValueError) as error:
            raise AttackError(
                "imprint reads what the manoeuvre imprint wrote, and these weights are not its: "
                "set the manoeuvre of the federation to imprint."
            ) from error
        return cls(**numbers, grid=(rows, columns), patch=(p, q), normed=normed)

    def plain(self) -> dict[str, Any]:
        about = asdict(self)
        return about | {"grid": list(self.grid), "patch": list(self.patch)}

    @property
    def places(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def signature_at(self) -> slice:
        return slice(self.pixels, self.pixels + SIGNATURE)

    @property
    def code_at(self) -> slice:
        return slice(self.signature_at.stop, self.signature_at.stop + self.code)

    @property
    def rulers_at(self) -> slice:
        return slice(self.code_at.stop, self.code_at.stop + self.rulers)

    @property
    def constant(self) -> int:
        return self.rulers_at.stop

    @property
    def balance(self) -> int:
        return self.constant + 1

    @property
    def sink(self) -> int:
        """Empty; where the second layers write, and what the head alone reads."""
        return self.constant + 2

    @property
    def witness(self) -> int:
        """Empty; in the gradient of a row it holds delta."""
        return self.constant + 3


@cache
def codewords(count: int) -> tuple[tuple[int, ...], ...]:
    """``count`` words of +1 and -1, any two of which differ in `DISTANCE` signs or more: the bits
    of a number, and checks by which every bit enters an odd number of times, at least three, and no
    two bits alike (Hsiao 1970). As few checks as that allows."""
    bits = max(1, (count - 1).bit_length())
    checks, columns = 0, list[int]()
    while len(columns) < bits:
        checks += 1
        columns = [c for c in range(1 << checks) if c.bit_count() % 2 and c.bit_count() >= 3]
    words = []
    for number in range(count):
        check = 0
        for bit in range(bits):
            check ^= columns[bit] if number >> bit & 1 else 0
        word = number | check << bits
        words.append(tuple(1 - 2 * (word >> at & 1) for at in range(bits + checks)))
    return tuple(words)


def places_code(layout: Layout) -> Tensor:
    """The code of every place, (N, code), in float64."""
    return torch.tensor(codewords(layout.places), dtype=torch.float64)


@cache
def patch_basis(p: int, q: int) -> Tensor:
    """An orthonormal basis of patches, (3 p q, 3 p q): cosines in opponent colours, in the order
    of their size in natural pictures (power falls as the square of the frequency; colour
    differences are about a twentieth of brightness)."""
    down, across = _cosines(p), _cosines(q)
    colours = torch.tensor(_COLOURS, dtype=torch.float64)
    colours = colours / colours.norm(dim=1, keepdim=True)
    waves = torch.einsum("kc,ui,vj->kuvcij", colours, down, across)
    frequency = torch.arange(p)[:, None].square() + torch.arange(q)[None].square()
    power = 1 / (0.3 + frequency.double())
    ranked = torch.tensor([1.0, 0.06, 0.02], dtype=torch.float64)[:, None, None] * power
    order = ranked.flatten().argsort(descending=True, stable=True)
    return waves.flatten(3).flatten(0, 2)[order]


def _cosines(n: int) -> Tensor:
    """The DCT-II of length ``n``, orthonormal: (frequency, pixel)."""
    at = torch.arange(n, dtype=torch.float64)
    waves = torch.cos(torch.pi * (2 * at[None] + 1) * at[:, None] / (2 * n))
    waves *= (2 / n) ** 0.5
    waves[0] /= 2**0.5
    return waves


def imagined_pictures(count: int, size: int, coin: torch.Generator) -> Tensor:
    """Pictures (count, 3, size, size) in [0, 1] with the statistics of natural ones, for a server
    that owns none: discs of all sizes in front of each other (dead leaves: Lee, Mumford and Huang
    2001), whose edges give the 1/f spectrum and the heavy tails of real photographs."""
    at = torch.arange(size).float()
    pictures = torch.empty(count, 3, size, size)
    for picture in pictures:
        light = 0.15 + 0.7 * torch.rand(1, generator=coin)
        picture.fill_(float(light))
        grain = 0.1 * torch.randn(3, size, size, generator=coin)
        for _ in range(60):
            y, x, r, shade, slope, rough = torch.rand(6, generator=coin).tolist()
            radius = size * 0.04 * (15 ** (1 - r))
            disc = (at[:, None] - y * size) ** 2 + (at[None] - x * size) ** 2 < radius**2
            colour = (light + shade - 0.5 + 0.12 * torch.randn(3, generator=coin)).view(3, 1, 1)
            shading = (slope - 0.5) * (at[None] - x * size) / size
            picture.copy_(torch.where(disc, colour + shading + rough**2 * grain, picture))
    return pictures.clamp_(0, 1)


def check_transformer(model: nn.Module, public: Public) -> None:
    """Raise for a model whose tokens would not come through as they are written."""
    kind = type(model).__name__
    try:
        parts = vit_parts(model)
    except ModelError as error:
        raise SpecError(f"imprint needs a Vision Transformer: {error}") from error
    if not isinstance(model, timm_vit.VisionTransformer) or hasattr(model, "dist_token"):
        reason = f"a {kind} is not timm's plain VisionTransformer"
    elif adapted_layers(model):
        reason = "it has LoRA adapters, whose gradients are not those of the layers they are on"
    elif frozen := _frozen(model):
        reason = f"it reads the gradient of {frozen}, which nobody trains (train.trainable)"
    elif parts.position is None:
        reason = "it has no learnable position embedding to write places into"
    elif model.get_parameter(parts.patch_weight).shape[1] != 3:
        reason = "its pictures do not have three channels"
    elif any(n * p != public.image_size for n, p in zip(parts.grid, parts.patch_size, strict=True)):
        reason = (
            f"its patches of {parts.patch_size[0]} px do not fill a side of {public.image_size}"
        )
    elif model.global_pool not in ("token", "avg"):
        reason = f"it pools by '{model.global_pool}', which does not reach every patch"
    elif len(model.blocks) < (2 if model.global_pool == "token" else 1):
        reason = "one block cannot both sort the tokens and read them"
    elif not isinstance(model.patch_embed.norm, nn.Identity):
        reason = "it has a norm inside the patch embedding"
    else:
        reason = next((w for b in model.blocks if (w := _unlike(b))), "")
        reason = reason or _noisy(model, public)
    if reason:
        raise SpecError(f"imprint cannot work on this model: {reason}; take a plain timm ViT.")


def _frozen(model: Any) -> str:
    """A layer whose gradient holds the bins, and that is not trained."""
    names = [f"blocks.{at}.mlp.fc1.weight" for at in range(len(model.blocks))]
    parameters = dict(model.named_parameters())
    return next((n for n in names if n in parameters and not parameters[n].requires_grad), "")


def _unlike(block: Any) -> str:
    """How a block differs from the one that can be written; nothing where it does not."""
    if type(block) is not timm_vit.Block or type(block.attn) is not timm_vit.Attention:
        return f"its blocks are {type(block).__name__}s"
    if type(block.mlp) is not Mlp or not isinstance(block.mlp.norm, nn.Identity):
        return "its MLPs are not two plain layers"
    if not (isinstance(block.mlp.fc1, nn.Linear) and block.mlp.fc1.bias is not None):
        return "its MLPs have no bias to hold a threshold"
    if not isinstance(block.attn.norm, nn.Identity) or getattr(block.attn, "gate", None):
        return "its attention is normed or gated"
    norms = (block.norm1, block.norm2)
    if not all(isinstance(n, nn.LayerNorm) and n.bias is not None for n in norms):
        return "its norms are no LayerNorms with scale and bias"
    far = torch.tensor([-1e4, 1e4], requires_grad=True)
    slopes = torch.autograd.grad(block.mlp.act(far).sum(), far)[0]
    if not torch.allclose(slopes, torch.tensor([0.0, 1.0]), atol=1e-6):
        return f"its activation {type(block.mlp.act).__name__} is no smooth step from 0 to 1"
    return ""


def _noisy(model: nn.Module, public: Public) -> str:
    """What a training pass drops at random; nothing in eval mode, or where all rates are 0."""
    if public.protocol.mode != "train":
        return ""
    rates = [float(m.p) for m in model.modules() if isinstance(m, nn.Dropout)]
    rates += [float(m.drop_prob or 0) for m in model.modules() if isinstance(m, DropPath)]
    rates += [float(m.prob) for m in model.modules() if isinstance(m, PatchDropout)]
    return "it drops parts at random in training" if any(rates) else ""

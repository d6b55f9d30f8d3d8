"""Imprint by weights alone: a stock Vision Transformer whose one update gives whole batches away.

No layer is added. The patch projection becomes a cosine transform, the position embedding a code
and a scattering of the places, the first attention a signature that every token of a picture bears.
The first layers of the MLPs become bins (see `imprinting`), the second ones write next to nothing,
so that every block hands on the tokens as they came. The head alone reads what they write.

Two ways to weigh it. *Lifted*, for one gradient or one local step: the uploaded entry of a token is
about 0.1, so that it survives a rounding to fixed point. The forward pass does not feel it: with
the rows w and the scale G of the norm before them, only w G matters there, while the gradient of w
carries G alone. *Still*, for several local steps: the gradient of all that makes the tokens is so
small that no step moves it, and every step's tokens add up as those of one larger batch; nothing is
lost to rounding, as the entries that are read begin at exactly zero.

The thresholds are quantiles of the rulers over pictures of the server's own, or over imagined ones
with the statistics of natural pictures. Weights are the same for all clients of a round, so that a
sum over them is a larger batch, and other ones in every round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.attacks.manoeuvres.imprinting import (
    AMPLITUDE,
    CONSTANT,
    SIGNATURE,
    Layout,
    check_transformer,
    imagined_pictures,
    patch_basis,
    places_code,
)
from fedsim.core.anatomy import vit_parts
from fedsim.core.manoeuvre import Brief, Manoeuvre, Tampered
from fedsim.core.observation import Public
from fedsim.core.seeds import seed_from
from fedsim.core.spec import Upload

_SHARP = 1e6  # of a row: the step is a thousandth of a bin wide, and float32 still tells it
_SOFT = 1e5  # where weights are to hold still: less of a step's gradient reaches them
_REACH = 0.1  # of a token's entries in the upload, where they are lifted
_UNFELT = 1e-3  # what the bins may add to a token, whose other coordinates are about 1
_DRIFT = 1e-7  # relative: how far local steps may move a second layer; rows add hundreds of tokens
_UNHEARD = 5e-7  # what they may add to the logits; more, and the gradient is out of all size
_SPAN = 30.0  # the way along all rulers, generously: second layers take turns in sign
_STEPS = 16  # of a client that goes over all it has, however much that is
# AdamW responds in proportion to gradients far below its 1e-8, as those of the rows then are. The
# second layers do move, so that the first step ends the bins: its batch is read, and no other.
_FAINT = 1e-15
_PLACE, _PATCH, _PICTURE = 1.2, 0.35, 0.3  # what moves a ruler: half range, deviation, deviation
_APART = 100.0  # the size of a token of no patch: what its picture adds is nothing to it
_PICTURES = 48  # that the quantiles are taken over
_JITTER = 0.03  # of the rulers' deviation: it smooths the quantiles of few pictures


@dataclass(frozen=True)
class ImprintWeights(Manoeuvre):
    """``rulers``: directions by which tokens are sorted. More of them see a token more often, each
    with fewer bins. ``hold_still``: whether the weights are kept from moving over local steps; by
    default, where there are several."""

    uses: ClassVar[frozenset[str]] = frozenset({"surrogate"})
    alike: ClassVar[bool] = True

    rulers: Annotated[int, Field(ge=2, le=32)] = 6
    hold_still: bool | None = None

    def check_model(self, model: nn.Module, public: Public) -> None:
        check_transformer(model, public)
        _layout(model, self.rulers)

    def tamper(self, brief: Brief) -> Tampered:
        model, public = brief.loaded(), brief.public
        check_transformer(model, public)
        coin = torch.Generator().manual_seed(seed_from(f"imprint {brief.seed} {brief.round}"))
        pictures, source = _pictures(brief, coin)
        layout = _layout(model, self.rulers)
        still = self._still(public)
        with torch.no_grad():
            writer = _Writer(model, layout, coin)
            writer.write_tokens(public.protocol.normalise(pictures))
            writer.write_bins(_Weighing.of(writer, public, len(brief.cohort), still))
        state = model.state_dict()
        changed = {n: t for n, t in state.items() if not torch.equal(t, brief.weights[n])}
        about = layout.plain() | {"blocks": len(writer.bins), "lifted": not still}
        words = (
            f"imprint: {writer.rows} bins along {layout.rulers} rulers, {layout.pixels} of "
            f"{3 * layout.patch[0] * layout.patch[1]} coefficients of a patch; quantiles from "
            f"{source}; {'held still over local steps' if still else 'lifted for one step'}"
        )
        return Tampered(changed, about, words)

    def _still(self, public: Public) -> bool:
        if self.hold_still is not None:
            return self.hold_still
        several = bool(public.local_epochs) or (public.local_steps or 1) > 1
        unlike_sgd = public.protocol.optimizer != "sgd"  # AdamW is linear in tiny gradients alone
        return public.protocol.upload is Upload.DELTA and (several or unlike_sgd)


def _pictures(brief: Brief, coin: torch.Generator) -> tuple[Tensor, str]:
    """The pictures that quantiles are taken over, and in words where they are from."""
    if brief.surrogate is not None and len(brief.surrogate):
        pictures = brief.surrogate[:_PICTURES].float()
        return pictures, f"{len(pictures)} pictures of the server's own"
    size = brief.public.image_size
    return imagined_pictures(_PICTURES, size, coin), f"{_PICTURES} imagined pictures"


def _layout(model: nn.Module, rulers: int) -> Layout:
    parts = vit_parts(model)
    width = model.get_parameter(parts.patch_weight).shape[0]
    normed = isinstance(getattr(model, "norm_pre", None), nn.LayerNorm)
    return Layout.fitting(width, parts.grid, parts.patch_size, rulers, normed=normed)


@dataclass(frozen=True)
class _Weighing:
    """The sizes that the forward pass and the upload depend on (see the module)."""

    sharp: float  # how steep a row is
    second: float  # a second layer's weights
    head: float  # the head's, and equally the last norm's scale
    row: float  # the one entry of a row

    @classmethod
    def of(cls, writer: _Writer, public: Public, clients: int, still: bool) -> _Weighing:
        places, protocol = writer.layout.places, public.protocol
        sharp = _SOFT if still else _SHARP
        second = _UNFELT / (sharp * _SPAN)
        if not still:
            felt = _UNHEARD / (sharp * _SPAN * places)  # delta, for a loss of one picture
            head = (felt / second * writer.damping) ** 0.5
            step = protocol.lr if protocol.upload is Upload.DELTA else 1.0
            scale = _REACH * public.batch_size * clients / (felt * step)
            return cls(sharp, second, head, sharp / scale)
        # A step moves a second layer by lr times the tokens' gradient times its input, about 2
        # sharp; the gradient is a mean over pictures, and a sum over their places.
        steps = public.local_steps or _STEPS
        gradient = _DRIFT * second / (protocol.lr * steps * places * 2 * sharp)
        if protocol.optimizer != "sgd":
            gradient = _FAINT
        return cls(sharp, second, (gradient * writer.damping) ** 0.5, 1e-3)

    @property
    def scale(self) -> float:
        """Of the norm before a row."""
        return self.sharp / self.row


class _Writer:
    """Writes the layout into a model, in place: the tokens first, then the bins that sort them."""

    def __init__(self, model: Any, layout: Layout, coin: torch.Generator):
        self.model, self.layout, self.coin = model, layout, coin
        self.parts = vit_parts(model)
        self.blocks: list[Any] = [model.get_submodule(name) for name in self.parts.blocks]
        self.pooled = model.global_pool == "avg"
        # With a class token, the last attention is what makes it depend on the patches.
        self.bins = self.blocks if self.pooled else self.blocks[:-1]
        self.rows = sum(block.mlp.fc1.out_features for block in self.bins)
        self.tokens = torch.empty(0)  # of the pictures, before the first bins, normalised
        self.damping = 1.0  # by how much a token's gradient is less than head times norm

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.coin)

    def write_tokens(self, pictures: Tensor) -> None:
        """Projection, embedding and the first attention, measured on ``pictures``."""
        for block in self.blocks:
            for part in (block.attn.qkv, block.attn.proj, block.mlp.fc2):
                _clear(part)
            for scale in (block.ls1, block.ls2):
                if not isinstance(scale, nn.Identity):
                    scale.gamma.fill_(1)
            _reset(block.norm1)
            _reset(block.norm2)
        self._write_embedding(pictures)
        embedded = torch.cat([self._embed(some) for some in pictures.split(8)])
        self._write_signature(embedded)
        attended = torch.cat([self._attend(some) for some in embedded.split(8)])
        self.tokens = attended[:, self.model.num_prefix_tokens :].flatten(0, 1)
        sizes = embedded.std(-1, correction=0).mean(0)
        self.damping = embedded.shape[1] * float(sizes[-1])
        if not self.pooled:
            self.damping *= float(sizes[0])
            last = self.blocks[-1].attn
            last.qkv.weight[2 * last.attn_dim, self.layout.sink] = 1
            last.proj.weight[self.layout.sink, 0] = 1

    def _write_embedding(self, pictures: Tensor) -> None:
        layout, model, parts = self.layout, self.model, self.parts
        K, rulers = layout.pixels, layout.rulers_at
        basis = patch_basis(*layout.patch)[:K].float()
        patches = F.unfold(pictures, layout.patch, stride=layout.patch).mT
        seen = AMPLITUDE * (patches @ basis.T).flatten(0, 1)
        ways = self.random(layout.rulers, K)
        ways *= _PATCH / (seen @ ways.T).std(0, correction=0).clamp(min=1e-3)[:, None]
        weight = torch.zeros(layout.width, basis.shape[1])
        weight[:K] = AMPLITUDE * basis
        weight[rulers] = ways @ weight[:K]
        weight[layout.balance] = -weight.sum(0)
        projection = model.get_parameter(parts.patch_weight)
        projection.copy_(weight.view_as(projection))
        if parts.patch_bias:
            model.get_parameter(parts.patch_bias).zero_()

        places = torch.zeros(layout.places, layout.width)
        places[:, layout.code_at] = places_code(layout).float()
        scatter = torch.rand(layout.places, layout.rulers, generator=self.coin)
        places[:, rulers] = _PLACE * (2 * scatter - 1)
        places[:, layout.constant] = CONSTANT
        places[:, layout.balance] = -places.sum(1)
        position = model.get_parameter(parts.position or "")
        position.zero_()
        position[0, position.shape[1] - layout.places :] = places

        # Tokens of no patch lie below every threshold, so that no bin ever holds them.
        other = torch.zeros(layout.width)
        other[rulers] = -_APART
        other[:K] = _APART * layout.rulers / K
        for token in (model.cls_token, model.reg_token):
            if token is not None:
                token.copy_(other.expand_as(token))
        if layout.normed:
            _reset(model.norm_pre)

    def _embed(self, pictures: Tensor) -> Tensor:
        model = self.model
        embedded: Tensor = model.norm_pre(model._pos_embed(model.patch_embed(pictures)))
        return embedded

    def _attend(self, embedded: Tensor) -> Tensor:
        block = self.blocks[0]
        attended = embedded + block.attn(block.norm1(embedded))
        return F.layer_norm(attended, attended.shape[-1:], eps=block.norm2.eps)

    def _write_signature(self, embedded: Tensor) -> None:
        """Attention without queries is a mean over the picture: what it reads of the pixels goes
        into every token's signature, and moves its rulers."""
        layout, attention = self.layout, self.blocks[0].attn
        count = SIGNATURE + layout.rulers
        means = self.blocks[0].norm1(embedded).mean(1)[:, : layout.pixels]
        ways = self.random(count, layout.pixels)
        told = means @ ways.T
        spread = told.std(0, correction=0) if len(told) > 1 else told.abs().mean(0)
        wanted = torch.full((count,), 0.5)
        wanted[SIGNATURE:] = _PICTURE
        ways *= (wanted / spread.clamp(min=1e-3))[:, None]
        values = slice(2 * attention.attn_dim, 2 * attention.attn_dim + count)
        attention.qkv.weight[values, : layout.pixels] = ways
        write = attention.proj.weight
        write[layout.signature_at, :SIGNATURE] = torch.eye(SIGNATURE)
        write[layout.rulers_at, SIGNATURE:count] = torch.eye(layout.rulers)
        write[layout.balance, :count] = -1

    def write_bins(self, weighing: _Weighing) -> None:
        """The MLPs, the last norm and the head."""
        layout, rulers = self.layout, self.layout.rulers
        thresholds = torch.empty(self.rows)
        for ruler in range(rulers):
            mine = thresholds[ruler::rulers]  # neighbours of one ruler lie in any blocks
            mine.copy_(self._quantiles(self.tokens[:, layout.rulers_at.start + ruler], len(mine)))
        at = 0
        for block in self.bins:
            first, count = block.mlp.fc1, block.mlp.fc1.out_features
            rows = torch.arange(at, at + count)
            first.weight.zero_()
            first.weight[torch.arange(count), layout.rulers_at.start + rows % rulers] = weighing.row
            first.bias.copy_(-weighing.sharp * thresholds[rows])
            turns = 1 - 2 * (rows // rulers % 2)  # neighbours undo each other in the forward pass
            block.mlp.fc2.weight[layout.sink] = weighing.second * turns
            block.norm2.weight.fill_(weighing.scale)
            block.norm2.weight[layout.witness] = 0
            block.norm2.bias[layout.witness] = weighing.scale
            at += count
        for norm in (self.model.norm, self.model.fc_norm):
            if isinstance(norm, nn.LayerNorm):
                norm.weight.zero_()
                norm.weight[layout.sink] = weighing.head
                if norm.bias is not None:
                    norm.bias.zero_()
        head = self.model.get_parameter(self.parts.head_weight)
        head.zero_()
        head[:, layout.sink] = weighing.head * class_levels(len(head))
        if self.parts.head_bias:
            self.model.get_parameter(self.parts.head_bias).zero_()

    def _quantiles(self, seen: Tensor, count: int) -> Tensor:
        copies = max(1, 20 * count // len(seen))
        jitter = _JITTER * seen.std(correction=0) * self.random(copies, len(seen))
        spread = (seen[None] + jitter).flatten().double()
        shares = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        return torch.quantile(spread, shares).float()


def class_levels(classes: int) -> Tensor:
    """What the head weighs every class by: no two alike, so that the gradient tells the class of a
    picture, and of both signs in turn, so that no class has the mean of all."""
    size = 1 + torch.arange(classes) / classes
    return torch.where(torch.arange(classes) % 2 == 0, size, -size)


def _clear(layer: nn.Linear) -> None:
    layer.weight.zero_()
    if layer.bias is not None:
        layer.bias.zero_()


def _reset(norm: nn.LayerNorm) -> None:
    norm.weight.fill_(1)
    if norm.bias is not None:
        norm.bias.zero_()

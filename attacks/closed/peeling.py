"""Peeling: single tokens out of bins that hold sums of them, along several rulers.

Every token falls into one bin of every ruler. A bin that holds one token alone shows it, and the
token proves itself (see `Reader.alone`). Then it is known where it falls along the other rulers,
and taken away there: bins of two become bins of one, and so on until no bin shows a new token. This
is the decoding of an erasure code by peeling (Luby et al. 2001): where tokens fall at random, all
come out up to about three quarters as many tokens as bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.attacks.closed.frame import uploaded
from fedsim.attacks.manoeuvres.imprinting import CONSTANT, Layout, places_code
from fedsim.core.errors import AttackError

CLEAN = 0.05  # of a code's unit: how far a coordinate may lie from where it must
# Relative: how far a token's mean square may lie from one. Readings that need more lenience wait
# until the others are taken away, because a mixture of two that are alike lies near one as well.
_SIZES = (1e-4, 5e-4, 2e-3)
_ECHO = 0.3  # of a token: less than that in a bin, and the token is not in it
_INSIDE = 2e-3  # in units of a normalised coordinate: how far a token may lie outside its bin
_ALIKE = 5e-3  # relative: two readings of one token are not further apart


@dataclass
class Bins:
    """What lies between neighbouring thresholds: ``sums`` (M, D) in float64, ordered by ruler and
    then by threshold; ``edges``: the thresholds of each ruler, ascending; the last bin of a ruler
    has no upper edge."""

    sums: Tensor
    edges: list[Tensor]

    @property
    def starts(self) -> list[int]:
        """The first bin of every ruler."""
        ends = torch.tensor([0, *map(len, self.edges)]).cumsum(0)
        return [int(end) for end in ends]


@dataclass
class Tokens:
    """Tokens that were read: ``x`` (T, D) as they were before LayerNorm, ``place`` (T,), ``votes``
    (T,): how many bins showed each, ``weight`` (T,): what it is multiplied by in the update, and
    ``size`` (T,): what LayerNorm divided it by."""

    x: Tensor
    place: Tensor
    votes: Tensor
    weight: Tensor
    size: Tensor


def read_bins(
    update: Mapping[str, Tensor], weights: Mapping[str, Tensor], names: list[str], layout: Layout
) -> Bins:
    """The bins behind an update, by the weights that were sent: ``names`` of the blocks' MLPs and
    the norms before them."""
    rows, ruler, threshold = [], [], []
    first, last = layout.rulers_at.start, layout.rulers_at.stop
    for name in names:
        weight, bias = (weights[f"{name}.mlp.fc1.{part}"].double() for part in ("weight", "bias"))
        scale = weights[f"{name}.norm2.weight"].double()
        read = weight[:, first:last]
        if weight.shape[1] != layout.width or int((weight != 0).sum()) != len(weight):
            raise AttackError(f"the rows of {name} read no single ruler: no imprint is in them.")
        which = read.abs().argmax(1)
        steep = read.gather(1, which[:, None])[:, 0] * scale[first + which]
        if not bool((steep > 0).all()):
            raise AttackError(f"the rows of {name} read no ruler: no imprint is in them.")
        (gradient,) = uploaded(update, [f"{name}.mlp.fc1.weight"], "imprint")
        turns = weights[f"{name}.mlp.fc2.weight"][layout.sink].double().sign()
        rows.append(gradient * turns[:, None])
        ruler.append(which)
        threshold.append(-bias / steep)
    above, of, at = torch.cat(rows), torch.cat(ruler), torch.cat(threshold)
    sums, edges = torch.empty_like(above), []
    done = 0
    for index in range(layout.rulers):
        mine = (of == index).nonzero()[:, 0]
        mine = mine[at[mine].argsort()]
        between = above[mine]
        between[:-1] -= above[mine[1:]]
        sums[done : done + len(mine)] = between
        edges.append(at[mine])
        done += len(mine)
    return Bins(sums, edges)


class Reader:
    """Reads the tokens out of bins, which it empties."""

    def __init__(self, bins: Bins, layout: Layout, eps: float):
        self.bins, self.layout, self.eps = bins, layout, eps
        self.code = places_code(layout)
        starts = bins.starts
        sizes = torch.tensor([len(edges) for edges in bins.edges])
        self.ruler = torch.repeat_interleave(torch.arange(layout.rulers), sizes)
        self.low = torch.cat(bins.edges)
        above = [torch.cat([e[1:], e.new_full((1,), torch.inf)]) for e in bins.edges]
        self.high = torch.cat(above)
        self.starts = starts
        self.u = bins.sums.new_zeros(0, layout.width)  # of the tokens found, normalised
        self.weight = bins.sums.new_zeros(0)  # what each is multiplied by in the bins
        self.place = torch.zeros(0, dtype=torch.long)
        self.votes = torch.zeros(0, dtype=torch.long)

    def read(self) -> Tokens:
        """All tokens that come out."""
        for lenience in _SIZES:
            todo = torch.arange(len(self.bins.sums))
            while len(todo):
                todo = self._take(*self.alone(todo, lenience))
        size = CONSTANT / self.u[:, self.layout.constant]
        return Tokens(self.u * size[:, None], self.place, self.votes, self.weight, size)

    def alone(
        self, which: Tensor, lenience: float = _SIZES[-1]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the bins ``which``, those that hold one token alone: bin, token (normalised), its
        weight, its place.

        With the witness' entry as weight, the rest is the token as LayerNorm gave it. Its mean is
        zero, which tells the coordinate that the row itself reads; that must lie inside the bin.
        Its mean square must be one; for a mean of several tokens of one sign it is less. The
        constant gives its size: then the code must be a place's, and what is empty must be empty.
        And it must be found along the other rulers too, of which an edge may hide one.
        """
        layout, sums = self.layout, self.bins.sums
        which = which[self._readable(which)]
        found = []
        for some in which.split(4096):
            weight = sums[some, layout.witness]
            u = sums[some] / weight[:, None]
            u[:, layout.witness] = 0
            own = layout.rulers_at.start + self.ruler[some]
            line = torch.arange(len(some))
            u[line, own] = 0
            u[line, own] = -u.sum(1)
            size = CONSTANT / u[:, layout.constant]
            x = u * size[:, None]
            place = (x[:, layout.code_at] @ self.code.T).argmax(1)
            square = u.square().mean(1) * (1 + self.eps / size.square())
            good = (size > 0) & (x[:, layout.sink].abs() < CLEAN)
            good &= (square - 1).abs() < lenience
            good &= (u[line, own] > self.low[some] - _INSIDE) & (
                u[line, own] < self.high[some] + _INSIDE
            )
            found.append((some[good], u[good], weight[good], place[good]))
        if not found:
            empty = torch.zeros(0, dtype=torch.long)
            return empty, self.u[:0], self.weight[:0], empty
        bins, u, weight, place = (torch.cat(part) for part in zip(*found, strict=True))
        echoes = self._echoes(u, weight) >= self.layout.rulers - 1
        return bins[echoes], u[echoes], weight[echoes], place[echoes]

    def _readable(self, which: Tensor) -> Tensor:
        """Whether a bin holds anything, and a code that is some place's: this settles most bins
        by a few of their coordinates."""
        layout, sums = self.layout, self.bins.sums
        constant = sums[which, layout.constant]
        codes = sums[:, layout.code_at][which] * (CONSTANT / constant)[:, None]
        place = (codes @ self.code.T).argmax(1)
        clean = (codes - self.code[place]).abs().amax(1) < CLEAN
        return clean & (sums[which, layout.witness] != 0) & (constant != 0)

    def _echoes(self, u: Tensor, weight: Tensor) -> Tensor:
        """Along how many rulers the bin of a token holds as much as it, or lies below them all."""
        count = torch.zeros(len(u), dtype=torch.long)
        least = _ECHO * weight.abs() * self.layout.width**0.5
        for ruler in range(self.layout.rulers):
            at = self._bin_of(u, ruler)
            held = self.bins.sums[at.clamp(min=0)].norm(dim=1)
            count += (at < 0) | (held > least)
        return count

    def _bin_of(self, u: Tensor, ruler: int) -> Tensor:
        """The bin of each token along a ruler; -1 for one below all its thresholds."""
        value = u[:, self.layout.rulers_at.start + ruler].contiguous()
        at = torch.bucketize(value, self.bins.edges[ruler]) - 1
        return torch.where(at < 0, -1, at + self.starts[ruler])

    def _take(self, bins: Tensor, u: Tensor, weight: Tensor, place: Tensor) -> Tensor:
        """Keep the new ones among these readings, empty the bins that showed them and take them
        away elsewhere; the bins that changed."""
        fresh = []
        for here in place.unique().tolist():
            mine = (place == here).nonzero()[:, 0]
            known = (self.place == here).nonzero()[:, 0]
            near = torch.cdist(u[mine], self.u[known]) < _ALIKE * self.layout.width**0.5
            seen = near.any(1)
            self.votes[known] += near.sum(0)
            mine = mine[~seen]
            while len(mine):  # readings of one token lie together: one after the other is gathered
                alike = (u[mine] - u[mine[0]]).norm(dim=1) < _ALIKE * self.layout.width**0.5
                fresh.append(mine[alike])
                mine = mine[~alike]
        self.bins.sums[bins] = 0
        if not fresh:
            return bins[:0]
        best = [_middle(u[some], weight[some]) for some in fresh]
        new_u, new_weight = torch.stack([b[0] for b in best]), torch.stack([b[1] for b in best])
        self.u, self.weight = torch.cat([self.u, new_u]), torch.cat([self.weight, new_weight])
        self.place = torch.cat([self.place, place[torch.stack([f[0] for f in fresh])]])
        counts = torch.tensor([len(some) for some in fresh])
        self.votes = torch.cat([self.votes, counts])
        shown = [set(bins[some].tolist()) for some in fresh]
        return self._remove(new_u, new_weight, shown)

    def _remove(self, u: Tensor, weight: Tensor, shown: list[set[int]]) -> Tensor:
        """Take tokens away from the bins in which they lie and that did not show them."""
        changed = []
        scaled = u * weight[:, None]
        scaled[:, self.layout.witness] = weight
        for ruler in range(self.layout.rulers):
            at = self._bin_of(u, ruler)
            inside = at >= 0
            inside &= ~torch.tensor([b in s for b, s in zip(at.tolist(), shown, strict=True)])
            some = inside.nonzero()[:, 0]
            self.bins.sums.index_add_(0, at[some], scaled[some], alpha=-1)
            changed.append(at[some])
        return torch.cat(changed).unique()


def _middle(u: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The median of several readings of one token: an outlier among three is voted down."""
    return u.median(0).values, weight.median()

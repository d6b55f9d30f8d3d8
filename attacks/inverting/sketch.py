"""Sketch: an update as a vector of fixed size, by feature hashing (Weinberger et al. 2009).

Every tensor is divided by its root mean square, whose logarithm is an entry of its own. A small
tensor keeps an entry for each of its numbers. In a large one several numbers share an entry, which
is their sum under random signs; all large ones have equally many, or the largest would crowd out
the rest. Which numbers meet is drawn from a seed, and is the same for all updates.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsim.core.errors import AttackError
from fedsim.core.learning import Update
from fedsim.core.seeds import seed_from

_NOTHING = 1e-30  # the size of a tensor of zeros
_HALF = 6e4  # what a number in half precision may be


class Sketch:
    """Updates of tensors of these ``sizes`` in about ``entries`` numbers."""

    def __init__(self, sizes: Mapping[str, int], entries: int, seed: int):
        self.sizes = dict(sizes)
        self.most = _level(list(self.sizes.values()), entries)
        self.seed = seed
        self._hashes: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}

    @classmethod
    def of(cls, update: Update, entries: int, seed: int) -> Sketch:
        """For updates like this one."""
        sizes = {name: tensor.numel() for name, tensor in numbers_of(update).items()}
        return cls(sizes, entries, seed)

    @property
    def length(self) -> int:
        return sum(min(size, self.most) + 1 for size in self.sizes.values())

    def lacking(self, update: Update) -> list[str]:
        """The tensors that are not in this update; they are taken for zeros."""
        return sorted(self.sizes.keys() - numbers_of(update).keys())

    def __call__(self, update: Update) -> Tensor:
        """The sketch (length,) of an update, on the CPU."""
        numbers, entries, scales = numbers_of(update), [], []
        for name, size in self.sizes.items():
            values = numbers[name].flatten() if name in numbers else torch.zeros(size)
            if len(values) != size:
                raise AttackError(
                    f"the update's '{name}' has {len(values)} numbers where simulated clients have "
                    f"{size}."
                )
            scale = values.square().mean().sqrt().clamp(min=_NOTHING)
            entries.append(self._hashed(name, values / scale))
            scales.append(scale.log())
        whole = torch.cat([torch.cat(entries), torch.stack(scales)])
        return torch.nan_to_num(whole).clamp(-_HALF, _HALF).cpu()

    def _hashed(self, name: str, values: Tensor) -> Tensor:
        """A large tensor in ``most`` sums; one that is small stays as it is."""
        if len(values) <= self.most:
            return values
        signs, order = self._hash(name, values.device)
        # A permutation and sums of rows: unlike scattered additions the same on every run.
        padded = F.pad(values * signs, (0, len(order) - len(values)))
        return padded.index_select(0, order).view(self.most, -1).sum(1)

    def _hash(self, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """The signs of a tensor's numbers, and the order in which they fall into its sums."""
        if (name, device) not in self._hashes:
            coin = torch.Generator().manual_seed(seed_from(f"{self.seed} sketch {name}"))
            size = self.sizes[name]
            shared = -(-size // self.most) * self.most
            signs = torch.randint(2, (size,), generator=coin).to(torch.int8) * 2 - 1
            order = torch.randperm(shared, generator=coin).to(torch.int32)
            self._hashes[name, device] = signs.to(device), order.to(device)
        return self._hashes[name, device]


def numbers_of(update: Update) -> dict[str, Tensor]:
    """Everything that was uploaded: the tensors, and buffers that are not counters."""
    if any(not tensor.is_floating_point() for tensor in update.tensors.values()):
        raise AttackError("the update is masked: to whoever cannot read the sum it is noise.")
    buffers = {f"buffer {n}": t for n, t in update.buffers.items() if t.is_floating_point()}
    return {name: t.detach().float() for name, t in {**update.tensors, **buffers}.items()}


def _level(sizes: list[int], entries: int) -> int:
    """The most entries a tensor may have, so that all have at most ``entries`` together."""
    low, high = 1, max(sizes)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(size, middle) for size in sizes) <= entries:
            low = middle
        else:
            high = middle - 1
    return low

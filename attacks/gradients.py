"""Gradients of single pictures, as flat vectors beside an update.

Of the numbers that an update holds those are kept that were uploaded and, where a defense hides
some as zeros, were not hidden; of more than can be held, so many at random. A picture is normalised
and learned from as the protocol says. Where BatchNorm mixes the pictures of a batch, each goes
through the model in the company of others, and is alone in the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.core.anatomy import batchnorm_names
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View
from fedsim.core.learning import Protocol

_COMPANY = 15  # pictures beside one where BatchNorm is in train mode


@dataclass(frozen=True)
class Gradients:
    """``kept``: by parameter, which of its numbers are looked at; None for all of them."""

    model: nn.Module
    protocol: Protocol
    kept: dict[str, Tensor | None]
    company: Tensor  # (K, 3, H, W), none where pictures do not mind each other
    classes: int

    @classmethod
    def of(
        cls, view: View, model: nn.Module, uploaded: Mapping[str, Tensor], others: Tensor, *,
        numbers: int, masked: bool,
    ) -> Gradients:  # fmt: skip
        """For a ``model`` as the client received it, and what it ``uploaded``; ``masked``: zeros
        were not. ``others`` are pictures that may keep one company."""
        device = next(model.parameters()).device
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        known = {name: tensor for name, tensor in uploaded.items() if name in trained}
        share = numbers / max(1, sum(tensor.numel() for tensor in known.values()))
        coin, kept = view.coin("numbers"), dict[str, Tensor | None]()
        for name, tensor in known.items():
            rows = tensor.flatten().nonzero()[:, 0].cpu() if masked else None
            if share < 1:
                rows = torch.arange(tensor.numel()) if rows is None else rows
                rows = rows[torch.rand(len(rows), generator=coin) < share]
            kept[name] = rows if rows is None else rows.to(device)
        if not any(rows is None or len(rows) for rows in kept.values()):
            raise AttackError("the update holds nothing that a gradient could be compared with.")
        protocol = view.known_protocol() or Protocol(mean=view.normalisation[0],
                                                     std=view.normalisation[1])  # fmt: skip
        mixes = model.training and bool(batchnorm_names(model))
        if not mixes:
            model.eval()  # what dropout the client drew nobody knows
        company = protocol.normalise(others[: _COMPANY if mixes else 0].to(device))
        with torch.no_grad():
            classes = model(protocol.normalise(others[:2].to(device))).shape[-1]
        return cls(model, protocol, kept, company, classes)

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """What is looked at of tensors by parameter, (n,)."""
        parts = []
        for name, rows in self.kept.items():
            numbers = tensors[name].detach().flatten()
            parts.append(numbers if rows is None else numbers[rows.to(numbers.device)])
        return torch.cat(parts).float()

    def of_one(self, picture: Tensor, label: int) -> Tensor:
        """The gradient (n,) of a picture (3, H, W) in [0, 1] with a label."""
        weights = {name: self.model.get_parameter(name) for name in self.kept}
        device = next(iter(weights.values())).device
        batch = torch.cat([self.protocol.normalise(picture[None].to(device)), self.company])
        loss = self.protocol.loss(self.model(batch)[:1], torch.tensor([label], device=device))
        found = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        return self.flat(dict(zip(weights, found, strict=True)))

    def of_all(self, pictures: Tensor, labels: Tensor) -> Tensor:
        """Those of several pictures, (B, n)."""
        rows = torch.empty(0)
        for at, (picture, label) in enumerate(zip(pictures, labels.tolist(), strict=True)):
            found = self.of_one(picture, label)
            if at == 0:  # filled in place: many of them take room
                rows = found.new_empty(len(pictures), len(found))
            rows[at] = found
        return rows

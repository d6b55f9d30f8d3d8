"""Imprint layer, decoded (Fowl et al. 2022, "Robbing the Fed", Sec. 3.2): pictures from the rows of
the layer that the manoeuvre of the same name put before the model.

Row l holds the sum of delta_i x_i over the pictures brighter than its threshold, its bias that of
delta_i. The quotient of neighbouring rows' differences is the picture between them where there is
one, and a blend where there are several. A blend does not always show: only where its parts pull in
different directions does its brightness leave the bin, or its pixels the range of a picture.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.attacks.closed import refuse_frozen, uploaded
from fedsim.core.attack import Attack, Progress, Reconstruction
from fedsim.core.errors import AttackError
from fedsim.core.imprinted import FIRST
from fedsim.core.knowledge import View
from fedsim.core.observation import Public

_HEARD = 1e-4  # of the loudest bin: what is fainter is rounding
_OUTSIDE = 0.02  # how far pixels in [0, 1] may lie outside, for rounding's sake


@dataclass(frozen=True)
class ImprintLayer(Attack):
    """Bins are believed loudest first, the possible ones before the impossible, up to the number
    of pictures in the batch."""

    @property
    def needs(self) -> frozenset[str]:
        shape = {"image_size", "normalisation", "batch_size"}
        return frozenset({"update", "weights", "tampering"} | shape)

    def check_model(self, model: nn.Module, public: Public) -> None:
        _refuse_plain(name for name, _ in model.named_parameters())
        refuse_frozen(model, (f"{FIRST}.weight", f"{FIRST}.bias"), "imprint_layer")

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        names = (f"{FIRST}.weight", f"{FIRST}.bias")
        _refuse_plain(view.weights)
        rows, shares = uploaded(view.update.tensors, names, "imprint_layer")
        edges = -view.weights[names[1]].double()
        mean, std = (torch.tensor(c, dtype=torch.float64).view(3, 1, 1) for c in view.normalisation)
        side = view.image_size

        def between(sums: Tensor) -> Tensor:
            return sums - torch.cat([sums[1:], torch.zeros_like(sums[:1])])

        between_rows, loud = between(rows), between(shares)
        heard = loud.abs() > _HEARD * loud.abs().max().clamp(min=1e-300)
        quotient = between_rows[heard] / loud[heard, None]
        images = quotient.view(-1, 3, side, side) * std + mean
        low = edges[heard]
        high = torch.cat([edges[1:], edges.new_full((1,), torch.inf)])[heard]
        bright = quotient.mean(1)
        slack = 1e-3 * (edges[-1] - edges[0])
        possible = (bright > low - slack) & (bright < high + slack)
        possible &= (images.flatten(1).amin(1) > -_OUTSIDE) & (
            images.flatten(1).amax(1) < 1 + _OUTSIDE
        )
        if not len(images):
            raise AttackError("no bin of the imprint layer holds anything: its gradient is zero.")
        order = (possible.double() * 1e9 + loud[heard].abs() / loud.abs().max()).argsort(
            descending=True
        )[: view.batch_size]
        progress(1, 1, None)
        blends = int((~possible[order]).sum())
        notes = [f"{int(heard.sum())} bins of {len(edges)} hold something"]
        notes += (
            [f"{blends} of {len(order)} are surely blends of several pictures"] if blends else []
        )
        notes.append("a bin with several pictures shows their blend, and mostly does not tell")
        return Reconstruction(images=images[order].clamp(0, 1).float(), notes=notes)


def _refuse_plain(parameters: Iterable[str]) -> None:
    if f"{FIRST}.weight" not in parameters:
        raise AttackError(
            "imprint_layer reads the layer that the manoeuvre imprint_layer adds, and this "
            "model has none: set the manoeuvre of the federation to imprint_layer."
        )

"""Imprint layer (Fowl et al. 2022, "Robbing the Fed"): a module of bins in front of any model.

Two linear layers with a ReLU between them are put before the model. Every row of the first takes
the picture's mean brightness against one threshold, ascending by quantile; the second leads back to
the shape of the picture, so that the model behind it still trains. The gradient of a row is the sum
over the pictures beyond its threshold, and neighbouring rows differ by what lies between them.

Anybody who looks at the architecture sees it, which is the difference to the manoeuvre `imprint`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fedsim.core.errors import SpecError
from fedsim.core.imprinted import FIRST, SECOND, Imprinted
from fedsim.core.manoeuvre import Brief, Manoeuvre, Tampered
from fedsim.core.models import IMPRINT_LAYER
from fedsim.core.observation import Public
from fedsim.core.seeds import seed_from
from fedsim.core.spec import Upload

# Mean brightness of photographs in [0, 1]: about normal around 0.45 with a deviation of 0.15; that
# of pictures of one's own is measured.
BRIGHTNESS = (0.45, 0.15)


@dataclass(frozen=True)
class ImprintLayer(Manoeuvre):
    """It takes a model with such a module: ``model.options.imprint_layer`` says of how many bins.

    The picture also goes around the bins, which only add to it: the paper's module ends in the
    mean of the rows, and either lets the gradient through.
    """

    uses: ClassVar[frozenset[str]] = frozenset({"surrogate"})

    alike: ClassVar[bool] = True

    def check_model(self, model: nn.Module, public: Public) -> None:
        if not isinstance(model, Imprinted):
            raise SpecError(
                f"imprint_layer reads a module of bins before the model, which has none: announce "
                f"one, model.options.{IMPRINT_LAYER}=128."
            )
        if public.protocol.upload is Upload.DELTA and public.protocol.optimizer != "sgd":
            raise SpecError(
                "imprint_layer reads gradients, and AdamW scales each of their entries; use sgd."
            )

    def tamper(self, brief: Brief) -> Tampered:
        model, protocol = brief.loaded(), brief.public.protocol
        assert isinstance(model, Imprinted)  # checked before a round ran
        bins = model.imprint_first.out_features
        pixels = model.imprint_first.in_features
        row = torch.full((pixels,), 1 / pixels)
        if brief.surrogate is not None and len(brief.surrogate):
            seen = protocol.normalise(brief.surrogate.float()).flatten(1).mean(1)
            source = f"{len(seen)} pictures of the server's own"
            mean, deviation = float(seen.mean()), float(seen.std(correction=0))
        else:
            bright, spread = BRIGHTNESS
            grey = protocol.normalise(torch.full((1, 3, 1, 1), bright))
            lighter = protocol.normalise(torch.full((1, 3, 1, 1), bright + spread))
            mean, deviation = float(grey.mean()), float((lighter - grey).mean())
            source = "what is usual"
        shares = (torch.arange(bins, dtype=torch.float64) + 0.5) / bins
        normal = torch.distributions.Normal(mean, max(deviation, 1e-4))
        thresholds = normal.icdf(shares).float()
        # Equal in all rows, so that differences of rows are single pictures, and uneven over the
        # pixels, lest a convolution behind should not feel it.
        coin = torch.Generator().manual_seed(seed_from(f"imprint_layer {brief.seed} {brief.round}"))
        back = 1e-3 * torch.randn(pixels, 1, generator=coin)
        changed = {
            f"{FIRST}.weight": row.expand(bins, -1).contiguous(),
            f"{FIRST}.bias": -thresholds,
            f"{SECOND}.weight": back.expand(-1, bins).contiguous(),
            f"{SECOND}.bias": torch.zeros(pixels),
        }
        about = {"bins": bins}
        words = f"imprint_layer: {bins} bins of mean brightness, quantiles from {source}"
        return Tampered(changed, about, words)

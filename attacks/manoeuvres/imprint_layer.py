"""Imprint layer (Fowl et al. 2022, "Robbing the Fed"): a module of bins in front of any model.

Two linear layers with a ReLU between them are put before the model. Every row of the first takes
the picture's mean brightness against one threshold, ascending by quantile; the second leads back to
the shape of the picture, so that the model behind it still trains. The gradient of a row is the sum
over the pictures beyond its threshold, and neighbouring rows differ by what lies between them.

Anybody who looks at the architecture sees it, which is the difference to the manoeuvre `imprint`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.core.errors import SpecError
from fedsim.core.manoeuvre import Brief, Manoeuvre, Tampered
from fedsim.core.observation import Public
from fedsim.core.seeds import seed_from
from fedsim.core.spec import Upload

FIRST, SECOND = "imprint_first", "imprint_second"
# Mean brightness of photographs in [0, 1]: about normal around 0.45 with a deviation of 0.15; that
# of pictures of one's own is measured.
BRIGHTNESS = (0.45, 0.15)


class Imprinted(nn.Module):
    """A model behind the module of bins; the bins are parameters like any others."""

    def __init__(self, model: nn.Module, side: int, bins: int):
        super().__init__()
        pixels = 3 * side * side
        self.imprint_first = nn.Linear(pixels, bins)
        self.imprint_second = nn.Linear(bins, pixels)
        self.model = model

    def get_classifier(self) -> nn.Module | None:
        """The head of the model behind, for whoever looks for it by timm's name."""
        getter = getattr(self.model, "get_classifier", None)
        head: nn.Module | None = getter() if getter is not None else None
        return head

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.imprint_first(images.flatten(1)))
        result: Tensor = self.model(images + self.imprint_second(hidden).view_as(images))
        return result


@dataclass(frozen=True)
class ImprintLayer(Manoeuvre):
    """``bins``: rows of the first layer; ``side``: of the pictures, for which the layer is made.

    The picture also goes around the bins, which only add to it: the paper's module ends in the
    mean of the rows, and either lets the gradient through.
    """

    uses: ClassVar[frozenset[str]] = frozenset({"surrogate"})

    bins: Annotated[int, Field(ge=2)] = 128
    side: Annotated[int, Field(ge=1)] = 32

    def check_model(self, model: nn.Module, public: Public) -> None:
        if public.image_size != self.side:
            raise SpecError(
                f"imprint_layer was made for pictures of {self.side} px, and those of this "
                f"federation have {public.image_size}; set side: {public.image_size}."
            )
        if public.protocol.upload is Upload.DELTA and public.protocol.optimizer != "sgd":
            raise SpecError(
                "imprint_layer reads gradients, and AdamW scales each of their entries; use sgd."
            )

    def prepare_model(self, model: nn.Module) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Imprinted(model, self.side, self.bins)

    def tamper(self, brief: Brief) -> Tampered:
        model, protocol = brief.loaded(), brief.public.protocol
        if not isinstance(model, Imprinted):
            raise SpecError("imprint_layer needs the model it prepared; let it prepare the model.")
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
        shares = (torch.arange(self.bins, dtype=torch.float64) + 0.5) / self.bins
        normal = torch.distributions.Normal(mean, max(deviation, 1e-4))
        thresholds = normal.icdf(shares).float()
        # Equal in all rows, so that differences of rows are single pictures, and uneven over the
        # pixels, lest a convolution behind should not feel it.
        coin = torch.Generator().manual_seed(seed_from(f"imprint_layer {brief.seed} {brief.round}"))
        back = 1e-3 * torch.randn(pixels, 1, generator=coin)
        changed = {
            f"{FIRST}.weight": row.expand(self.bins, -1).contiguous(),
            f"{FIRST}.bias": -thresholds,
            f"{SECOND}.weight": back.expand(-1, self.bins).contiguous(),
            f"{SECOND}.bias": torch.zeros(pixels),
        }
        about = {"bins": self.bins, "side": self.side}
        words = f"imprint_layer: {self.bins} bins of mean brightness, quantiles from {source}"
        return Tampered(changed, about, words)

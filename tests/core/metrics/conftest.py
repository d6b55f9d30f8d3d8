"""Pictures to measure."""

from __future__ import annotations

import torch

COIN = torch.Generator().manual_seed(0)


A = torch.rand(3, 3, 16, 16, generator=COIN)

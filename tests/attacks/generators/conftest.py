"""Small generators."""

from __future__ import annotations

SMALL = {"latent_size": 8, "width": 4}

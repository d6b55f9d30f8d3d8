"""A small bench: two defenses at three strengths."""

from __future__ import annotations

from tests.conftest import SMALL

NOISE = "{name: gaussian_noise, strengths: [{std: 0.0}, {std: 1.0, relative: true}]}"


DEFENSES = f"[{NOISE}, {{name: mjp, strengths: [{{ratio: 0.5, probability: 1.0}}]}}]"


BENCH = [
    *SMALL,
    "train={rounds: 1, clients_per_round: 2, lr: 0.05, evaluate: false}",
    f"bench={{defenses: {DEFENSES}, utility: {{train: {{rounds: 2, evaluate: true}}}}}}",
]

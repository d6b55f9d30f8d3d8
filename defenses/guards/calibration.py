"""Calibration: from where on guards speak up, set on honest rounds and on no attacked one.

About 1,500 client-rounds of honest federations on CIFAR-10 (seeds 0 to 2): convnet, resnet18 and
ViT-Ti/8 at 32 px of depth 4 and 6, fresh and after 50 to 500 steps on the clients' own pictures
(which the convnet then knows by heart); batches of 2 to 64; labels drawn alike, two a client, or
one; gradients and weight deltas of up to 20 local steps, SGD and AdamW. Limits stand above what was
seen there, with room where pretrained models may be wider than ours were.
`experiments/active/guards.py` measures false alarms on other rounds.
"""

from __future__ import annotations

import math

# D-SNR, by the number of pictures that are compared: five to ten times the largest honest value by
# residuals (5.2; 7.1; 0.74; 0.42; 0.15).
D_SNR = {2: 50.0, 4: 30.0, 8: 10.0, 16: 5.0, 64: 2.0}
# The paper's own number has no limit that overfitted models keep (118,000; 1,220; 89; 25; 3 in a
# first sample, up to 1e17 in later ones): where all of a batch but one picture are known with
# certainty, that picture truly stands alone, and gives itself away without any tampering. Of fresh
# models it stays below 3 in batches of two (resnet18: 52) and below 1 in most larger ones.
D_SNR_PLAIN = {2: 1e7, 4: 3e4, 8: 3e3, 16: 300.0, 64: 30.0}

# Weights. In brackets: the largest honest value.
TWINS = 0.05  # the share of a layer's rows with a twin (0)
ONE_DIRECTION = 0.6  # the share of a layer's rows that one direction explains (0.30)
DEAD_FILTERS = 0.5  # the share of a convolution's filters that are zero (0; pretrained ones differ)
BIAS_GAP = 10.0  # between the head's biases (0.22; unbalanced classes: the log of their ratio)
ROW_NORMS = 10.0  # the head's largest row by the median one (3.2)
BLOCKS = 100.0  # sizes of one tensor in different blocks (3.2; pretrained models are wider)
MOVED = 10.0  # how far a tensor moves, by its size and SMALL (1.4)
SMALL = 0.05  # as large as any tensor is taken to be: what began as zeros may move
SHRUNK = 0.01  # to which part of its size a tensor falls (0.88)

# Losses, by that of guessing. A fresh model's is about 1 (2.0 at most, resnet18 on two pictures).
# Later, where clients hold one or two labels and the step is large, federations diverge with nobody
# at fault: 11 times in one that recovered, 95 in one that did not. A limit of 10 would see fished
# batches that this one does not, and would take every such federation for an attack.
FRESH_LOSS = 5.0
LOSS_JUMP = 200.0


def d_snr_limit(pictures: int, *, plain: bool = False) -> float:
    """The limit for a batch of so many pictures: between those above, by powers."""
    limits = D_SNR_PLAIN if plain else D_SNR
    sizes = sorted(limits)
    pictures = min(max(pictures, sizes[0]), sizes[-1])
    upper = next(size for size in sizes if size >= pictures)
    lower = max(size for size in sizes if size <= pictures)
    if upper == lower:
        return limits[upper]
    share = math.log(pictures / lower) / math.log(upper / lower)
    return float(limits[lower] ** (1 - share) * limits[upper] ** share)

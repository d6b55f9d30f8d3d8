"""Calibration: from where on guards speak up, set on honest rounds and on no attacked one.

1,000 client-rounds of honest federations on CIFAR-10 (seeds 0 to 2): convnet, resnet18 and ViT-Ti/8
at 32 px of depth 4 and 6, fresh and after 50 to 500 steps on the clients' own pictures (which the
convnet then knows by heart); batches of 2 to 64; labels drawn alike, two a client, or one; gradients
and weight deltas of up to 20 local steps, SGD and AdamW. Limits stand above what was seen there,
with room where pretrained models may be wider than ours were. `experiments/active/guards.py`
measures false alarms on other rounds.
"""

from __future__ import annotations

import math

# D-SNR, by pictures in the batch: ten times and more the largest honest value (118,000; 1,220; 89;
# 25; 3). Those are of models that know all of a batch by heart but one picture: its gradient truly
# stands alone, and a small batch of such a model gives it away without any tampering; where the
# others are known with certainty their gradients vanish, and no limit is high enough. Fresh models
# stay below 3 in batches of two (resnet18: 52) and below 1 in most larger ones, so a federation
# that never overfits may set a lower limit and sees gentler attacks.
D_SNR = {2: 1e7, 4: 3e4, 8: 3e3, 16: 300.0, 64: 30.0}

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


def d_snr_limit(pictures: int) -> float:
    """The limit for a batch of so many pictures: between those above, by powers."""
    sizes = sorted(D_SNR)
    pictures = min(max(pictures, sizes[0]), sizes[-1])
    upper = next(size for size in sizes if size >= pictures)
    lower = max(size for size in sizes if size <= pictures)
    if upper == lower:
        return D_SNR[upper]
    share = math.log(pictures / lower) / math.log(upper / lower)
    return float(D_SNR[lower] ** (1 - share) * D_SNR[upper] ** share)

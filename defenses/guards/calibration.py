"""Calibration."""
from __future__ import annotations
TWINS=.05
ONE_DIRECTION=.8
DEAD_FILTERS=.5
BIAS_GAP=20.
ROW_NORMS=10.
BLOCKS=100.
MOVED=10.
SMALL=.01
SHRUNK=.01
def d_snr_limit(pictures: int) -> float:
    return 10.0
BY_CHANCE=4.
JUMP=2.
JUMP_NOISE=2.

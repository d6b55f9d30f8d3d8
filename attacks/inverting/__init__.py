"""Inverting: a network that is learned on simulated clients, and maps what they upload to what
they saw. The sketch makes a vector of an update, the rehearsal makes the clients."""

from fedsim.attacks.inverting.network import MOST_PICTURES, Inversion, in_order
from fedsim.attacks.inverting.rehearsal import (
    Example,
    Layout,
    Rehearsal,
    batch_of,
    read_labels,
    shrunk,
)
from fedsim.attacks.inverting.sketch import Sketch
from fedsim.attacks.inverting.training import Course, Training

__all__ = [
    "MOST_PICTURES",
    "Course",
    "Example",
    "Inversion",
    "Layout",
    "Rehearsal",
    "Sketch",
    "Training",
    "batch_of",
    "in_order",
    "read_labels",
    "shrunk",
]

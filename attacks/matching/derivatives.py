"""Ways to differentiate: which matcher to trust, asked of the model and the device at hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fedsim.attacks.matching.matcher import AGREEMENT, Match, Matcher, Way
from fedsim.core.errors import AttackError

WayName = Literal["auto", "first_order", "double"]


def choose_way(
    make: Callable[[Way], Matcher], engine: WayName, images: Tensor, labels: Tensor
) -> tuple[Matcher, str]:
    """The matcher to use, and why.

    ``auto`` computes one derivative both ways, on this model and device, and takes the
    first-order one, which does less work, wherever it agrees with double backward. Agreement
    alone decides, not a stopwatch: the same seed must give the same numbers.
    """
    if engine != "auto":
        return make(engine), f"engine: {engine}, as asked for"
    reference = make("double")
    try:
        fast = make("first_order")
    except AttackError as error:
        return reference, f"engine: double ({error})"
    # Two seeds take the path that several will; a little off the start, which may be a solution.
    sample, classes = images[:2], labels[:2]
    coin = torch.Generator().manual_seed(0)
    sample = sample + 0.1 * torch.randn(sample.shape, generator=coin).to(sample)
    a, seconds = _timed(fast, sample, classes)
    try:
        b, reference_seconds = _timed(reference, sample, classes)
    except torch.OutOfMemoryError:
        return fast, "engine: first_order, unchecked: double backward does not fit in memory"
    cosine = float(torch.cosine_similarity(a.images.flatten(), b.images.flatten(), dim=0))
    words = f"cosine {cosine:.6f} to double backward, {seconds / reference_seconds:.2f} of its time"
    if cosine >= AGREEMENT:
        return fast, f"engine: first_order ({words})"
    return reference, f"engine: double (first_order disagrees: {words})"


def _timed(matcher: Matcher, images: Tensor, labels: Tensor) -> tuple[Match, float]:
    matcher(images, labels)
    if images.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    match = matcher(images, labels)
    if images.device.type == "cuda":
        torch.cuda.synchronize()
    return match, max(time.perf_counter() - began, 1e-9)

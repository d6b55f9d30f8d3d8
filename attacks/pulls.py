"""Pulls: how far each local step of SGD moves the weights, as seen from the end of the round.

Momentum carries a step on, a schedule of the learning rate weighs it, and FedProx takes a part of
what was moved back at every step. All three are linear, so a delta is a sum of the steps' gradients
with factors that anybody who knows the protocol can compute.
"""

from __future__ import annotations

from fedsim.core.learning import Protocol


def step_pulls(protocol: Protocol, steps: int) -> list[float]:
    """How far the weights are moved by the gradient of each step, in learning rates: the steps run
    backwards."""
    shares = [protocol.schedule.share(at, steps) for at in range(steps)]
    on_memory, on_moved = 0.0, 1.0
    pulls = []
    for share in reversed(shares):
        on_memory += share * on_moved
        pulls.append(on_memory)
        on_moved -= protocol.lr * protocol.proximal * on_memory
        on_memory *= protocol.momentum
    return pulls[::-1]


def momentum_pull(protocol: Protocol, steps: int) -> float:
    """How many steps' worth of a constant gradient ``steps`` SGD steps move by."""
    return sum(step_pulls(protocol, steps))


def kept_weight(protocol: Protocol, steps: int) -> float:
    """What is left of a weight after SGD steps without any gradient: what weight decay leaves."""
    weight, memory = 1.0, 0.0
    for rate in protocol.rates(steps):
        pull_back = protocol.proximal * (weight - 1)
        memory = protocol.momentum * memory + protocol.weight_decay * weight + pull_back
        weight -= rate * memory
    return weight

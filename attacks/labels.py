"""Labels: read from the update of the classification head.

With cross-entropy the head's bias has the gradient mean_i(p_i - y_i): only a class that is in
the batch can have a negative entry, and with one image exactly the true class has.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsim.core.errors import AttackError
from fedsim.core.learning import Update
from fedsim.core.models import head_names


def recover_labels(update: Update, model: nn.Module, batch_size: int) -> Tensor:
    """The labels (B,) behind an update, sorted; a class may come more than once."""
    names = head_names(model)
    found = [update.tensors[name] for name in names if name in update.tensors]
    if not found:
        raise AttackError(
            f"the update holds no gradient of the head ({', '.join(names)}), so the labels "
            f"cannot be read from it."
        )
    evidence = found[-1] if found[-1].dim() == 1 else found[0].sum(1)
    if update.kind == "delta":
        evidence = -evidence  # a descent step moves against the gradient
    return labels_from_counts(evidence.double().cpu(), batch_size)


def labels_from_counts(gradient: Tensor, batch_size: int) -> Tensor:
    """Greedy counting on the head's bias gradient (C,), after LLG (Wainakh et al. 2022).

    Each sample pulls its class down by about one impact; the most negative class is taken,
    one impact is given back, and so on. Scale free, so that it also reads weight deltas.
    """
    classes = len(gradient)
    remaining = gradient.clone()
    negative = remaining[remaining < 0].sum()
    impact = negative / batch_size * (1 + 1 / classes)
    labels = []
    for index in torch.nonzero(gradient < 0).flatten().tolist()[:batch_size]:
        labels.append(index)  # a negative entry is proof of presence
        remaining[index] -= impact
    while len(labels) < batch_size:
        index = int(remaining.argmin())
        labels.append(index)
        remaining[index] -= impact
    return torch.tensor(sorted(labels), dtype=torch.long)

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
    evidence = (found[-1] if found[-1].dim() == 1 else found[0].sum(1)).double().cpu()
    if update.kind == "delta":
        evidence = -evidence  # a descent step moves against the gradient
        return labels_from_counts(evidence, batch_size, scale_known=False)
    return labels_from_counts(evidence, batch_size, scale_known=len(found[-1].shape) == 1)


def labels_from_counts(gradient: Tensor, batch_size: int, *, scale_known: bool = True) -> Tensor:
    """Greedy counting on the head's bias gradient (C,), after LLG (Wainakh et al. 2022).

    Each sample pulls its class down by one impact: the most negative class is taken, one impact
    is given back, and so on. In a gradient the impact is 1 / B; where the scale is not known (a
    weight delta, a head without bias) it is estimated from the sum of the negative entries.
    """
    remaining = gradient.clone()
    negative = remaining.clamp(max=0).sum().abs()
    impact = 1 / batch_size
    if not scale_known:
        impact = float(negative) / batch_size * (1 + 1 / len(gradient))
    labels = torch.nonzero(gradient < 0).flatten()[:batch_size].tolist()  # proofs of presence
    remaining[labels] += impact
    while len(labels) < batch_size:
        index = int(remaining.argmin())
        labels.append(index)
        remaining[index] += impact
    return torch.tensor(sorted(labels), dtype=torch.long)

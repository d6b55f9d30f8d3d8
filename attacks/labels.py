"""Labels: read from the update of the classification head.

With cross-entropy, the gradient in the logits of sample i is p_i - y_i. The head's bias gets its
mean over the batch, so only a class that is in the batch can have a negative entry; the head's
weights get mean_i (p_i - y_i) h_i^T, with h_i the features of sample i. From these:

- ``bias``: counts of every class, from the bias gradient; knows repeated labels.
- ``min``: the classes whose weight rows hold the most negative entry (GradInversion Eq. 8);
  distinct labels only.
- ``sum``: the classes whose weight rows have the most negative sum (iDLG); needs features that
  are never negative, as after a ReLU; a ViT's are signed.
- ``rows``: counts from the sums of the weight rows, for features that are never negative: what is
  left to read where a sparsified bias shows next to nothing.
- ``steps``: counts behind a weight delta of local steps, whose predictions are followed along
  the way, under Adam and AdamW by simulating the bias (`label_steps`).
- ``auto`` takes what the update shows: ``steps`` for a delta whose protocol is known, ``bias``
  where there is a bias that is not mostly zeros, ``rows`` or ``sum`` where the weight rows have one
  sign each, else ``min``.

The counts need the mean predictions p; they are those of the mean features, which are the
least-squares solution of dW = db h^T. What label smoothing and class weights make of this is in
`class_shares`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedsim.attacks.class_shares import class_shares, is_bent, unsmoothed
from fedsim.attacks.label_steps import followed, read_off
from fedsim.attacks.pulls import momentum_pull
from fedsim.core.anatomy import head_names, vit_parts
from fedsim.core.augment import mixes
from fedsim.core.epochs import samples_of_epoch, steps_of_round
from fedsim.core.errors import AttackError, ModelError
from fedsim.core.knowledge import View
from fedsim.core.learning import Protocol, Update
from fedsim.core.spec import Upload

Rule = Literal["auto", "bias", "rows", "min", "sum", "steps"]
_ONE_SIGN = 0.5  # of the rows: where features have one sign, so have the rows of absent classes


def labels_left(view: View) -> Tensor | None:
    """The labels of the pictures that a server's manoeuvre left in an update, where it knows
    them."""
    isolated = view.isolated
    return None if isolated is None else isolated.labels


@dataclass(frozen=True)
class HeadUpdate:
    """The update of the classifier, as an ascent direction."""

    weight: Tensor | None  # (C, D)
    bias: Tensor | None  # (C,)

    @classmethod
    def of(cls, update: Update, model: nn.Module) -> HeadUpdate:
        try:
            names = head_names(model)
        except ModelError as error:
            raise AttackError(f"the labels cannot be read: {error}") from error
        uploaded = [update.tensors[name] for name in names if name in update.tensors]
        if not uploaded:
            raise AttackError(
                f"the update holds no gradient of the head ({', '.join(names)}), so the labels "
                f"cannot be read from it; a search by gradients may look for them (labels: joint)."
            )
        if not all(bool(torch.isfinite(tensor).all()) for tensor in uploaded):
            raise AttackError("the head's update holds numbers that are not finite.")
        by_rank = {tensor.dim(): update.kind.sign * tensor.double().cpu() for tensor in uploaded}
        return cls(by_rank.get(2), by_rank.get(1))

    def unsmoothed(self, protocol: Protocol, model: nn.Module) -> HeadUpdate:
        """As if no label had been smoothed, where both parts are there to tell."""
        if self.weight is None or self.bias is None or not is_bent(protocol.loss):
            return self
        predictions = _predictions(self, model, self.bias, self.weight)
        return HeadUpdate(*unsmoothed(protocol.loss, predictions, self.weight, self.bias))


def recover_labels(
    update: Update,
    model: nn.Module,
    count: int,
    rule: Rule = "auto",
    *,
    protocol: Protocol | None = None,
    steps: int = 1,
    epochs: int = 1,
) -> Tensor:
    """The labels (count,) behind an update, sorted.

    ``protocol``, ``steps`` and the ``epochs`` that they make up are how the client trained, where
    the attacker knows it.
    """
    head = HeadUpdate.of(update, model)
    whole = head
    if protocol is not None and update.kind is Upload.GRADIENT and protocol.clip is None:
        head = head.unsmoothed(protocol, model)  # a delta is, once its steps are taken apart
    if rule == "auto":
        rule = _choose(head, update, protocol, count)
    if rule == "steps":
        if protocol is None:
            raise AttackError("labels: steps needs the client's optimiser, which is not known.")
        if protocol.optimizer != "sgd":
            return _labels_by_simulation(head, model, count, protocol, steps, epochs)
        return _labels_from_steps(head, model, count, protocol, steps, update.loss)
    if rule == "bias":
        if head.bias is None:
            raise AttackError("labels: bias needs the head's bias, which the update lacks.")
        if update.kind is Upload.DELTA or (protocol is not None and protocol.clip is not None):
            return labels_from_counts(head.bias, count)  # of unknown scale
        return _labels_from_bias(whole, model, count, protocol)
    if head.weight is None:
        raise AttackError(f"labels: {rule} needs the head's weight, which the update lacks.")
    if rule == "rows":
        return labels_from_counts(head.weight.sum(1), count)
    if rule == "min":
        return labels_by_min(head.weight, count)
    return labels_by_sum(head.weight, count)


def _choose(head: HeadUpdate, update: Update, protocol: Protocol | None, count: int) -> Rule:
    if head.weight is not None and head.bias is not None and sparse(head.bias):
        if one_signed(head.weight) >= _ONE_SIGN:
            return "rows"
        return "min" if count <= len(head.weight) else "bias"
    if update.kind is Upload.DELTA and head.bias is not None and _follows(head, protocol):
        return "steps"
    if head.bias is not None:
        return "bias"
    assert head.weight is not None
    return "sum" if one_signed(head.weight) >= _ONE_SIGN else "min"


def _follows(head: HeadUpdate, protocol: Protocol | None) -> bool:
    """Whether the head's steps can be followed: adaptive optimisers take no notice of clipping."""
    if protocol is None:
        return False
    if protocol.optimizer == "sgd":
        return head.weight is not None and protocol.clip is None
    return protocol.loss.known_weights is None and not mixes(protocol.augment)


def sparse(bias: Tensor) -> bool:
    """Whether most of it was not uploaded: a bias gradient has no zeros of its own."""
    return float((bias == 0).double().mean()) > 0.5


def one_signed(weight: Tensor) -> float:
    """The share of rows whose entries nearly all have one sign."""
    positive = (weight > 0).double().sum(1)
    present = (weight != 0).double().sum(1).clamp(min=1)
    lean = torch.maximum(positive, present - positive) / present
    return float((lean > 0.95).double().mean())


def labels_by_min(weight: Tensor, count: int) -> Tensor:
    """Distinct labels: the ``count`` classes with the most negative entry in their row."""
    _enough_classes(weight, count)
    return weight.amin(1).argsort()[:count].sort().values


def labels_by_sum(weight: Tensor, count: int) -> Tensor:
    """Distinct labels: the ``count`` classes with the most negative sum of their row."""
    _enough_classes(weight, count)
    return weight.sum(1).argsort()[:count].sort().values


def _enough_classes(weight: Tensor, count: int) -> None:
    if count > len(weight):
        raise AttackError(
            f"this rule finds distinct labels, but {count} images are more than the "
            f"{len(weight)} classes; use labels: bias."
        )


def _labels_from_bias(
    head: HeadUpdate, model: nn.Module, count: int, protocol: Protocol | None
) -> Tensor:
    """Counts behind one gradient:  n = B (mean p - db), under plain cross-entropy."""
    assert head.bias is not None
    start = _predictions(head, model, head.bias, head.weight)
    return _counted_under(protocol or Protocol(), start, head.bias, count)


def _counted_under(protocol: Protocol, predictions: Tensor, bias: Tensor, count: int) -> Tensor:
    mixed = mixes(protocol.augment) and protocol.loss.soft == "mixed"
    shares, present = class_shares(protocol.loss, predictions, bias, mixed=mixed)
    return counted(shares, count, present)


def _labels_from_steps(
    head: HeadUpdate, model: nn.Module, count: int, protocol: Protocol, steps: int, loss: float
) -> Tensor:
    """Counts of ``count`` samples seen over ``steps`` SGD steps, from the head's delta.

    The predictions move from where they were to where the update leaves them; their mean along the
    way, less the labels, is what the bias moved by.
    """
    assert head.weight is not None
    assert head.bias is not None
    parameters = dict(model.named_parameters())
    weight, bias = (parameters[name].detach().double().cpu() for name in head_names(model))
    pull = momentum_pull(protocol, steps)
    decay = protocol.weight_decay
    step_bias = head.bias / (protocol.lr * pull) - decay * bias
    step_weight = head.weight / (protocol.lr * pull) - decay * weight
    along = [
        _predictions(head, model, step_bias, step_weight, share=k / steps) for k in range(steps)
    ]
    wary = torch.stack(along).mean(0)
    if is_bent(protocol.loss) or mixes(protocol.augment):
        return _counted_under(protocol, wary, step_bias, count)
    sure = 2 * wary - 1 / len(wary)  # without the uniform half
    return counted(followed(sure, wary, step_bias, loss), count, step_bias < 0)


def _labels_by_simulation(
    head: HeadUpdate, model: nn.Module, count: int, protocol: Protocol, steps: int, epochs: int
) -> Tensor:
    """Counts of ``count`` samples seen over ``steps`` steps of Adam or AdamW."""
    if head.bias is None:
        raise AttackError("labels: steps needs the head's bias, which the update lacks.")
    bias = model.get_parameter(head_names(model)[1]).detach().double().cpu()
    shares = read_off(-head.bias, bias, protocol, count=count, steps=steps, epochs=epochs)
    return counted(shares, count, torch.zeros(len(shares), dtype=torch.bool))


def _predictions(
    head: HeadUpdate,
    model: nn.Module,
    bias_step: Tensor,
    weight_step: Tensor | None,
    share: float = 0.0,
) -> Tensor:
    """What the model predicts on average, (C,), after a share of the update.

    The mean features are the least-squares solution h of dW = db h^T. One softmax of a mean is
    surer than the mean of softmaxes, so it is averaged with the uniform distribution.
    """
    uniform = torch.full_like(bias_step, 1 / len(bias_step))
    if weight_step is None:
        return uniform
    features = weight_step.T @ bias_step / bias_step.square().sum().clamp(min=1e-300)
    parameters = dict(model.named_parameters())
    names = head_names(model)
    logits = parameters[names[0]].detach().double().cpu() @ features
    if len(names) > 1:
        logits = logits + parameters[names[1]].detach().double().cpu()
    if share and head.weight is not None and head.bias is not None:
        logits = logits - share * (head.weight @ features + head.bias)
    return (logits.softmax(0) + uniform) / 2


def counted(shares: Tensor, count: int, present: Tensor) -> Tensor:
    """Labels from the estimated share of every class; what is proven to be there comes first."""
    taken = present.long()
    if int(taken.sum()) > count:  # more proofs than samples: noise; the largest shares win
        return shares.argsort(descending=True)[:count].sort().values
    while int(taken.sum()) < count:
        taken[int((count * shares - taken).argmax())] += 1
    return torch.repeat_interleave(torch.arange(len(taken)), taken)


def labels_from_counts(gradient: Tensor, batch_size: int) -> Tensor:
    """Greedy counting on a bias gradient of unknown scale, after LLG (Wainakh et al. 2022).

    Each sample pulls its class down by one impact, estimated from the sum of the negative entries:
    the most negative class is taken, one impact is given back, and so on.
    """
    remaining = gradient.clone()
    impact = float(remaining.clamp(max=0).sum().abs()) / batch_size * (1 + 1 / len(gradient))
    proven = int((gradient < 0).sum())  # only a class that is there can be negative
    labels = gradient.argsort()[: min(batch_size, proven)].tolist()
    remaining[labels] += impact
    while len(labels) < batch_size:
        index = int(remaining.argmin())
        labels.append(index)
        remaining[index] += impact
    return torch.tensor(sorted(labels), dtype=torch.long)


def behind(view: View) -> tuple[int, int, int]:
    """Pictures behind the update, its steps and epochs, as far as the protocol tells."""
    size = view.batch_size
    if view.update.kind is Upload.GRADIENT or not view.grants("local_steps"):
        return size, 1, 1
    steps, epochs = view.local_steps
    if not epochs:
        return size * (steps or 1), steps or 1, 1
    count = samples_of_epoch(view.update.num_examples, epochs)
    return count, steps_of_round(steps, epochs, count, size), epochs


def batch_size_from_rank(update: Update, model: nn.Module) -> int:
    """How many samples stand behind one gradient, where nobody says: by rank.

    The head's weight gradient is a sum of B outer products whose columns sum to zero over the
    classes: its rank is B up to C - 1. Beyond, the first attention's weights of a ViT have rank
    B N + 1 for N tokens, but only float64 shows it: in float32 its spectrum has no gap there.
    """
    if update.kind is not Upload.GRADIENT:
        raise AttackError("the batch size can be read from one gradient, not from a weight delta.")
    head = HeadUpdate.of(update, model)
    if head.weight is not None:
        rank, most = numerical_rank(head.weight), min(len(head.weight) - 1, head.weight.shape[1])
        if rank < most:
            return max(1, rank)
    try:
        parts = vit_parts(model)
    except ModelError:
        parts = None
    names = parts.attention.weights if parts and parts.attention else ()
    reads = [update.tensors[name] for name in names if name in update.tensors]
    if parts is not None and reads and reads[0].dtype == torch.float64:
        gradient = torch.cat(reads)
        rank, tokens = numerical_rank(gradient), parts.sequence
        if rank < 0.9 * min(gradient.shape):
            return max(1, round((rank - 1) / tokens))
    raise AttackError(
        "the batch is too large for its size to show in the rank of the update; grant batch_size."
    )


def numerical_rank(matrix: Tensor) -> int:
    """Singular values before the largest gap below one part in 1e4: the rank in float32."""
    values = torch.linalg.svdvals(matrix.double())
    values = values[values > 0]
    if not len(values):
        return 0
    relative = values / values[0]
    steps = relative[:-1] / relative[1:]
    gaps = torch.where(relative[1:] < 1e-4, steps, torch.zeros_like(steps))
    if len(gaps) and float(gaps.max()) > 10:
        return int(gaps.argmax()) + 1
    return len(values)

"""Features: what the head read of every picture, and their labels; no picture is claimed.

Where clients train the head alone, nothing below it is uploaded, and no equation reaches a pixel.
What the head itself read is told all the same. With residuals r_i = p_i - y_i,

    dW = mean_i r_i h_i^T        db = mean_i r_i

so one picture's features are dW^T db / |db|^2, exactly. Of a batch the labels are read first, then
the features are searched whose residuals, which they decide themselves (p_i = softmax(W h_i + b)),
give dW and db: C D equations for B D unknowns, of which C - 1 classes' are independent. Features of
a well-trained network are as good as a name: they find a face among others. Derived here; the
counts are those of `labels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.attacks.labels import HeadUpdate, behind, recover_labels
from fedsim.core.anatomy import head_names
from fedsim.core.attack import Attack, Progress, Reconstruction
from fedsim.core.errors import AttackError, ModelError
from fedsim.core.knowledge import View
from fedsim.core.losses import Loss
from fedsim.core.observation import Public
from fedsim.core.spec import Upload

_APART = 1e-2  # of their size: pictures of one class must not begin alike


@dataclass(frozen=True)
class Features(Attack):
    """``steps``: of the search for the features of a batch, by L-BFGS in float64."""

    needs: ClassVar[frozenset[str]] = frozenset(
        {"update", "weights", "architecture", "image_size", "batch_size"}
    )
    uses: ClassVar[frozenset[str]] = frozenset(
        {"optimizer", "learning_rate", "local_steps", "normalisation"}
    )

    steps: Annotated[int, Field(ge=0)] = 300

    def check_model(self, model: nn.Module, public: Public) -> None:
        try:
            weight = head_names(model)[0]
        except ModelError as error:
            raise AttackError(f"features reads the head: {error}") from error
        if not model.get_parameter(weight).requires_grad:
            raise AttackError(
                f"features needs the gradient of {weight}, which nobody trains in this federation "
                f"(train.trainable, or a defense that freezes a part)."
            )

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        model, notes = view.model(), ["no picture is claimed: labels and features alone"]
        count, steps, epochs = behind(view)
        protocol = view.known_protocol()
        labels = recover_labels(
            view.update, model, count, protocol=protocol, steps=steps, epochs=epochs
        )
        head = HeadUpdate.of(view.update, model)
        if head.weight is None:
            raise AttackError("features needs the gradient of the head's weight, which is lacking.")
        loss = None
        if protocol is not None and protocol.optimizer != "sgd":
            notes.append(f"{protocol.optimizer} scales every weight on its own: features are bent")
        if count == 1:
            features = one_feature(head, labels)
        else:
            features = by_class(head, labels, view.coin("features"))
            if view.update.kind is Upload.DELTA or head.bias is None:
                notes.append("several steps or no bias: each picture gets its class's mean")
            elif count >= len(head.weight):
                notes.append(
                    f"{count} pictures and {len(head.weight)} classes: the head does not determine "
                    f"single features, each picture gets its class's mean"
                )
            else:
                known = Loss() if protocol is None else protocol.loss
                features, loss = searched(head, model, labels, features, known, self.steps)
        progress(1, 1, loss)
        side = view.image_size
        return Reconstruction(
            images=torch.zeros(0, 3, side, side),
            labels=labels,
            features=features.float(),
            loss=loss,
            notes=notes,
        )


def one_feature(head: HeadUpdate, labels: Tensor) -> Tensor:
    """The features (1, D) of one picture: exact with a bias, else up to their size."""
    assert head.weight is not None
    if head.bias is not None and bool(head.bias.any()):
        features = head.weight.T @ head.bias / head.bias.square().sum()
    else:
        features = -head.weight[int(labels[0])]
    return features[None]


def by_class(head: HeadUpdate, labels: Tensor, coin: torch.Generator) -> Tensor:
    """A first guess at the features (B, D): for each picture the mean of its class.

    Row c of dW is  mean_i p_ic h_i - (n_c / B) m_c,  m_c the mean features of class c. The first
    term is what absent classes have alone; it is taken in their mean direction.
    """
    assert head.weight is not None
    weight, count = head.weight, len(labels)
    times = torch.bincount(labels, minlength=len(weight))
    absent = weight[times == 0].mean(0) if bool((times == 0).any()) else torch.zeros(1)
    means = (absent - weight) * count / times.clamp(min=1)[:, None]
    guess = means[labels]
    noise = torch.randn(guess.shape, generator=coin, dtype=guess.dtype)
    return guess + _APART * guess.std() * noise


def searched(
    head: HeadUpdate, model: nn.Module, labels: Tensor, start: Tensor, loss: Loss, steps: int
) -> tuple[Tensor, float]:
    """Features (B, D) whose gradient is that of the head, and how far it still is, relative."""
    assert head.weight is not None
    assert head.bias is not None
    weight, bias = (model.get_parameter(name).detach().double().cpu() for name in head_names(model))
    # The head tells only what lies in the row space of its gradient, and that is where all lies.
    _, _, rows = torch.linalg.svd(head.weight, full_matrices=False)
    basis = rows[: len(labels)]
    inside = torch.cat([head.weight @ basis.T, head.bias[:, None]], 1)
    scale = inside.square().sum()
    given = (start @ basis.T).requires_grad_(True)
    through = weight @ basis.T

    def gap() -> Tensor:
        residuals = _residuals(given @ through.T + bias, labels, loss)
        ones = torch.ones(len(given), 1, dtype=given.dtype)
        return (residuals.T @ torch.cat([given, ones], 1) - inside).square().sum() / scale

    optimizer = torch.optim.LBFGS(
        [given], max_iter=steps, tolerance_grad=1e-14, tolerance_change=1e-16,
        history_size=50, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = gap()
        value.backward()
        return value

    if steps:
        optimizer.step(closure)
    left = float(gap().detach().sqrt())
    return given.detach() @ basis, left


def _residuals(logits: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """The gradient of the loss in the logits (B, C), differentiable in them."""
    return torch.autograd.grad(loss(logits, labels), logits, create_graph=True)[0]

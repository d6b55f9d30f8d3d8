"""Learning: one function for clients and attackers, pure, and equal to plain torch."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedsim.core.defense import Defense
from fedsim.core.errors import FedsimError
from fedsim.core.learning import (
    Protocol,
    Trail,
    batchnorm_buffers,
    digest,
    learn,
    local_update,
)
from fedsim.core.losses import Loss
from fedsim.core.models import build_model
from fedsim.core.optimizers import Schedule
from fedsim.core.spec import ModelSpec

COIN = torch.Generator().manual_seed(0)
IMAGES, LABELS = torch.rand(4, 3, 32, 32, generator=COIN), torch.tensor([0, 1, 2, 3])
BATCHES = [(IMAGES[:2], LABELS[:2]), (IMAGES[2:], LABELS[2:])]


@pytest.fixture
def vit():
    spec = ModelSpec(options={"patch_size": 8, "depth": 2, "embed_dim": 96})
    return build_model(spec, image_size=32, num_classes=5, seed=0)


@pytest.fixture
def resnet():
    return build_model(ModelSpec(name="resnet10t"), image_size=32, num_classes=5, seed=0)


def test_a_gradient_upload_is_the_gradient(vit) -> None:
    update = local_update(vit, BATCHES[:1], Protocol(mean=(0, 0, 0), std=(1, 1, 1)))
    F.cross_entropy(vit(IMAGES[:2]), LABELS[:2]).backward()
    for name, parameter in vit.named_parameters():
        torch.testing.assert_close(update.tensors[name], parameter.grad)
    assert update.num_examples == 2


@pytest.mark.parametrize(
    ("protocol", "optimizer"),
    [
        (
            Protocol(upload="delta", lr=0.1, momentum=0.9, weight_decay=0.01),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        ),
        (
            Protocol(upload="delta", optimizer="adamw", lr=1e-3, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
        ),
    ],
)
def test_a_delta_is_what_plain_torch_training_moves(vit, protocol, optimizer) -> None:
    update = local_update(vit, BATCHES, protocol)
    plain = copy.deepcopy(vit)
    steps = optimizer(plain.parameters())
    for images, labels in BATCHES:
        steps.zero_grad()
        F.cross_entropy(plain((images - 0.5) / 0.5), labels).backward()
        steps.step()
    before = dict(vit.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(update.tensors[name], parameter - before[name])


def test_clipping_bounds_the_norm_of_the_gradient(vit) -> None:
    update = local_update(vit, BATCHES[:1], Protocol(clip=0.01))
    norm = torch.cat([t.flatten() for t in update.tensors.values()]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)


def test_it_is_pure(resnet) -> None:
    before = digest(resnet.state_dict())
    first = local_update(resnet, BATCHES, Protocol(upload="delta"))
    second = local_update(resnet, BATCHES, Protocol(upload="delta"))
    assert digest(resnet.state_dict()) == before
    assert digest(first.tensors) == digest(second.tensors)


def test_dropout_is_drawn_from_the_seed() -> None:
    spec = ModelSpec(options={"patch_size": 8, "depth": 2, "embed_dim": 96, "proj_drop_rate": 0.5})
    model = build_model(spec, image_size=32, num_classes=5, seed=0)
    one, same, other = (local_update(model, BATCHES[:1], Protocol(), seed=s) for s in (1, 1, 2))
    assert digest(one.tensors) == digest(same.tensors) != digest(other.tensors)


def test_batchnorm_statistics_travel_only_where_they_are_shared(resnet) -> None:
    shared = local_update(resnet, BATCHES[:1], Protocol(batchnorm="shared"))
    local = local_update(resnet, BATCHES[:1], Protocol(batchnorm="local"))
    assert shared.buffers.keys() == batchnorm_buffers(resnet).keys()
    assert local.buffers == {}


def test_eval_mode_uses_and_keeps_the_running_statistics(resnet) -> None:
    update = local_update(resnet, BATCHES[:1], Protocol(mode="eval"))
    for name, value in batchnorm_buffers(resnet).items():
        assert torch.equal(update.buffers[name], value)


def test_frozen_parameters_are_not_uploaded(vit) -> None:
    vit.pos_embed.requires_grad_(False)
    for upload in ("gradient", "delta"):
        assert "pos_embed" not in local_update(vit, BATCHES[:1], Protocol(upload=upload)).tensors


def test_several_batches_make_no_gradient_upload(vit) -> None:
    with pytest.raises(FedsimError, match="one batch"):
        local_update(vit, BATCHES, Protocol())
    with pytest.raises(FedsimError, match="no batch"):
        local_update(vit, [], Protocol())


def test_an_update_with_a_nan_is_not_finite(vit) -> None:
    update = local_update(vit, BATCHES[:1], Protocol())
    assert update.is_finite()
    update.tensors["pos_embed"][0, 0, 0] = float("nan")
    assert not update.is_finite()


def plain_steps(model, batches, optimizer, loss_of, rates=None):
    """The same training in plain torch; what it moves."""
    plain = copy.deepcopy(model)
    before = {n: p.detach().clone() for n, p in plain.named_parameters()}
    steps = optimizer(plain.parameters())
    for at, batch in enumerate(batches):
        if rates is not None:
            steps.param_groups[0]["lr"] = rates[at]
        steps.zero_grad()
        loss_of(plain, before, *batch).backward()
        steps.step()
    return {n: p.detach() - before[n] for n, p in plain.named_parameters()}


def plainly(model, before, images, labels):
    return F.cross_entropy(model((images - 0.5) / 0.5), labels)


def assert_moves(update, expected) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(update.tensors[name], tensor, rtol=1e-3, atol=1e-6)


def test_fedprox_pulls_the_weights_back_as_its_paper_has_it(vit) -> None:
    def proximal(model, before, images, labels):
        away = [(p - before[n]).square().sum() for n, p in model.named_parameters()]
        return plainly(model, before, images, labels) + 10.0 / 2 * torch.stack(away).sum()

    batches = [*BATCHES, *BATCHES]
    protocol = Protocol(upload="delta", lr=0.05, proximal=10.0)
    expected = plain_steps(vit, batches, lambda p: torch.optim.SGD(p, lr=0.05), proximal)
    assert_moves(local_update(vit, batches, protocol), expected)
    without = local_update(vit, batches, replace(protocol, proximal=0.0))
    held, free = (
        torch.cat([t.flatten() for t in u.tensors.values()]).norm()
        for u in (local_update(vit, batches, protocol), without)
    )
    assert held < 0.9 * free


def test_adam_with_a_schedule_is_plain_torchs(vit) -> None:
    protocol = Protocol(
        upload="delta", optimizer="adam", lr=1e-3, betas=(0.8, 0.95), weight_decay=0.1,
        schedule=Schedule("linear", final=0.5),
    )  # fmt: skip
    optimizer = lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.8, 0.95), weight_decay=0.1)  # noqa: E731
    rates = [1e-3, 0.75e-3]
    assert protocol.rates(2) == pytest.approx(rates)
    assert_moves(
        local_update(vit, BATCHES, protocol), plain_steps(vit, BATCHES, optimizer, plainly, rates)
    )


def test_accumulated_batches_are_one_step_on_their_mean_gradient(vit, resnet) -> None:
    whole = local_update(vit, [(IMAGES, LABELS)], Protocol())
    parts = local_update(vit, [(IMAGES, LABELS)], Protocol(micro=2))
    assert parts.num_examples == 4
    assert_moves(parts, whole.tensors)
    apart = [local_update(resnet, [batch], Protocol()).tensors for batch in BATCHES]
    together = local_update(resnet, [(IMAGES, LABELS)], Protocol(micro=2)).tensors
    for name, tensor in together.items():  # BatchNorm sees each batch by itself
        torch.testing.assert_close(tensor, (apart[0][name] + apart[1][name]) / 2)


def test_mixed_labels_and_other_losses_are_learned_from(vit) -> None:
    soft = torch.eye(5)[LABELS] * 0.7 + torch.eye(5)[LABELS.roll(1)] * 0.3
    loss = Loss(label_smoothing=0.1)
    update = local_update(vit, [(IMAGES, soft)], Protocol(loss=loss))
    whole = F.cross_entropy(vit((IMAGES - 0.5) / 0.5), soft, label_smoothing=0.1)
    expected = torch.autograd.grad(whole, list(vit.parameters()))
    for tensor, gradient in zip(update.tensors.values(), expected, strict=True):
        torch.testing.assert_close(tensor, gradient)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_is_repeated_to_the_last_bit_and_stays_near(vit, precision) -> None:
    full = local_update(vit, BATCHES[:1], Protocol())
    first, again = (local_update(vit, BATCHES[:1], Protocol(precision=precision)) for _ in range(2))
    assert digest(first.tensors) == digest(again.tensors)
    assert digest(first.tensors) != digest(full.tensors)
    assert all(tensor.dtype == torch.float32 for tensor in first.tensors.values())
    stored = local_update(vit, BATCHES[:1], Protocol(upload_dtype=precision))
    for name, tensor in stored.tensors.items():
        assert tensor.dtype == getattr(torch, precision)
        assert torch.equal(stored.widened().tensors[name], full.tensors[name].to(tensor).float())
    assert full.widened() is full
    assert stored.nbytes() * 2 == full.nbytes()


class Doubled(Defense):
    """Shows the model every picture twice, and remembers what it was told."""

    def __init__(self) -> None:
        self.tossed_with: list[torch.Generator] = []
        self.steps = 0

    def protect_batch(self, images, labels, model, rng):
        return torch.cat([images, images]), torch.cat([labels, labels])

    def toss(self, model, rng) -> None:
        self.tossed_with.append(rng)

    def tossed(self, model):
        return {"a": torch.zeros(1)}, {"a": torch.ones(1)}

    def protect_update(self, update, rng):
        self.steps = update.steps
        return update


def test_pictures_count_once_however_often_a_defense_shows_them(vit) -> None:
    coin, defense, trail = torch.Generator(), Doubled(), Trail()
    told = {"defenses": [defense], "rng": coin}
    update = learn(copy.deepcopy(vit), BATCHES, Protocol(upload="delta"), trail=trail, **told)
    assert update.num_examples == 4
    assert defense.tossed_with == [coin, coin]  # before each step, by the client's own coin
    assert defense.steps == 2
    assert [e["stage"] for e in trail.entries] == ["batch", "network"]
    plain = local_update(vit, BATCHES, Protocol(upload="delta"))
    assert update.loss == pytest.approx(plain.loss, rel=1e-5)


def test_a_model_of_which_nothing_is_trained_is_told_in_a_sentence() -> None:
    frozen = nn.Linear(3, 2).requires_grad_(requires_grad=False)
    with pytest.raises(FedsimError, match="nothing of the model is trained"):
        local_update(frozen, [(torch.rand(1, 3), torch.tensor([0]))], Protocol(upload="delta"))

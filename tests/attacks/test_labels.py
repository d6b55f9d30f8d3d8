"""Labels from the head's update: each rule where it holds, and where it fails."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedsim.attacks.labels import (
    batch_size_from_rank,
    counted,
    labels_by_min,
    labels_by_sum,
    labels_from_counts,
    numerical_rank,
    one_signed,
    recover_labels,
)
from fedsim.clients.data.datasets import load_images
from fedsim.core.errors import AttackError
from fedsim.core.learning import Protocol, Update, local_update
from fedsim.core.losses import Loss
from fedsim.core.models import build_model
from fedsim.core.optimizers import Schedule
from fedsim.core.spec import DataSpec, ModelSpec

TINY = ModelSpec(options={"patch_size": 8, "depth": 2, "embed_dim": 96})


def vit(classes: int = 8) -> nn.Module:
    return build_model(TINY, image_size=32, num_classes=classes, seed=0)


def photos(count: int, start: int = 0, step: int = 37) -> torch.Tensor:
    images = load_images(DataSpec(image_size=32), "train")
    return torch.stack([images.image((start + step * i) % len(images)) for i in range(count)])


def right(found: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of labels found, each counted as often as it is there."""
    rest, hits = labels.tolist(), 0
    for label in found.tolist():
        if label in rest:
            rest.remove(label)
            hits += 1
    return hits / len(labels)


def test_a_batch_with_repeated_labels_is_counted() -> None:
    model, labels = vit(), torch.tensor([0, 0, 0, 2, 2, 5, 7, 7])
    update = local_update(model, [(photos(8), labels)], Protocol())
    assert recover_labels(update, model, 8).tolist() == labels.tolist()


def test_repeated_labels_at_batch_16_are_counted_on_an_untrained_vit() -> None:
    model, shares = vit(10), []
    for trial in range(8):
        coin = torch.Generator().manual_seed(trial)
        labels = torch.randint(0, 10, (16,), generator=coin)
        update = local_update(model, [(photos(16, trial), labels)], Protocol())
        shares.append(right(recover_labels(update, model, 16), labels))
    assert sum(shares) / len(shares) >= 0.95


TRAININGS = {
    "smoothed": Protocol(loss=Loss(label_smoothing=0.1)),
    "strongly smoothed": Protocol(loss=Loss(label_smoothing=0.4)),
    "weighted": Protocol(loss=Loss(weights=(0.5, 1, 2, 1, 1, 3, 1, 0.2))),
    "both": Protocol(loss=Loss(label_smoothing=0.2, weights=(0.5, 1, 2, 1, 1, 3, 1, 0.2))),
    "autocast": Protocol(precision="bfloat16"),
    "uploaded in half": Protocol(upload_dtype="bfloat16"),
    "accumulated": Protocol(micro=2),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_labels_are_counted_however_people_train(name: str) -> None:
    model, labels, protocol = vit(), torch.tensor([0, 0, 0, 2, 2, 5, 7, 7]), TRAININGS[name]
    update = local_update(model, [(photos(8), labels)], protocol).widened()
    assert recover_labels(update, model, 8, protocol=protocol).tolist() == labels.tolist()


def test_smoothed_labels_of_several_steps_are_counted() -> None:
    model, labels = vit(), torch.tensor([0, 0, 2, 5])
    protocol = Protocol(
        upload="delta", lr=0.01, loss=Loss(label_smoothing=0.3), schedule=Schedule("linear"),
        proximal=0.5,
    )  # fmt: skip
    update = local_update(model, [(photos(4), labels)] * 3, protocol)
    found = recover_labels(update, model, 4, protocol=protocol, steps=3)
    assert found.tolist() == labels.tolist()


def test_mixed_labels_are_counted_by_their_masses() -> None:
    model, labels = vit(), torch.tensor([0, 3, 5, 6])
    own = torch.eye(8)[labels]
    protocol = Protocol(augment=({"name": "MixUp"},))
    mixed = 0.8 * own + 0.2 * own.roll(1, 0)
    update = local_update(model, [(photos(4), mixed)], protocol)
    assert recover_labels(update, model, 4, protocol=protocol).tolist() == labels.tolist()


def test_distinct_labels_at_batch_32_by_min_and_bias_but_not_by_sum() -> None:
    model, shares = vit(100), {"min": 0.0, "bias": 0.0, "sum": 0.0}
    for trial in range(4):
        coin = torch.Generator().manual_seed(trial)
        labels = torch.randperm(100, generator=coin)[:32]
        update = local_update(model, [(photos(32, trial), labels)], Protocol())
        for rule in ("min", "bias", "sum"):
            shares[rule] += right(recover_labels(update, model, 32, rule), labels) / 4
    assert shares["min"] >= 0.99
    assert shares["bias"] >= 0.99
    assert shares["sum"] < 0.8  # a ViT's features are signed


def test_rules_by_hand() -> None:
    # Classes 1 and 3 are there: their rows have the most negative entry; row 0 the least sum.
    weight = torch.tensor([[-1.0, -1.0, -1.0], [5.0, -4.0, 5.0], [1.0, 1.0, 1.0], [9.0, -3.0, 0]])
    assert labels_by_min(weight, 2).tolist() == [1, 3]
    assert labels_by_sum(weight, 2).tolist() == [0, 2]
    with pytest.raises(AttackError, match="distinct"):
        labels_by_min(weight, 5)


def test_counting_by_hand() -> None:
    # Four samples, p uniform over 4 classes, labels 1, 1, 1, 3: gradient = 1/4 - counts / 4.
    gradient = torch.tensor([0.25, 0.25 - 0.75, 0.25, 0.25 - 0.25])
    assert counted(0.25 - gradient, 4, gradient < 0).tolist() == [1, 1, 1, 3]
    even = torch.tensor([0.25, -0.25, 0.25, -0.25])
    assert labels_from_counts(3 * even, 4).tolist() == [1, 1, 3, 3]  # at any scale


def test_auto_takes_the_rule_that_the_update_allows() -> None:
    labels = torch.tensor([1, 4])
    spec = ModelSpec(name="convnet", options={"channels": [8], "head_bias": False})
    relu = build_model(spec, image_size=32, num_classes=8, seed=0)
    update = local_update(relu, [(photos(2), labels)], Protocol())
    weight = update.tensors["3.weight"]
    assert one_signed(weight) >= 0.5  # features after a ReLU: the sum rule holds
    assert recover_labels(update, relu, 2).tolist() == labels.tolist()

    model = vit()
    update = local_update(model, [(photos(2), labels)], Protocol())
    del update.tensors["head.bias"]
    assert one_signed(update.tensors["head.weight"]) < 0.5
    assert recover_labels(update, model, 2).tolist() == labels.tolist()  # by the min rule


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"weight_decay": 0.1}])
def test_labels_behind_several_local_steps(options: dict) -> None:
    model = vit()
    labels = torch.tensor([0, 0, 2, 2, 2, 5, 7, 7])
    protocol = Protocol(upload="delta", lr=0.01, **options)
    images = photos(8)
    batches = [(images[:4], labels[:4]), (images[4:], labels[4:])]
    update = local_update(model, batches, protocol)
    found = recover_labels(update, model, 8, protocol=protocol, steps=2)
    assert right(found, labels) >= 7 / 8


def test_labels_of_a_clipped_batch_are_counted_without_its_scale() -> None:
    model, labels = vit(), torch.tensor([1, 1, 5, 5])
    protocol = Protocol(clip=0.01)
    update = local_update(model, [(photos(4, step=120), labels)], protocol)
    assert recover_labels(update, model, 4, protocol=protocol).tolist() == [1, 1, 5, 5]


def test_labels_are_also_read_from_a_weight_delta_of_unknown_scale() -> None:
    model = vit()
    update = local_update(model, [(photos(1), torch.tensor([3]))], Protocol(upload="delta"))
    assert recover_labels(update, model, 1).tolist() == [3]


def test_labels_without_a_head_are_an_error_that_says_so() -> None:
    with pytest.raises(AttackError, match="head"):
        recover_labels(Update("gradient", {}), vit(), 1)


def test_a_rule_without_its_layer_is_an_error_that_says_so() -> None:
    model = vit()
    update = local_update(model, [(photos(1), torch.tensor([3]))], Protocol())
    del update.tensors["head.bias"]
    with pytest.raises(AttackError, match="bias"):
        recover_labels(update, model, 1, "bias")


@pytest.mark.parametrize("size", [1, 3, 6])
def test_the_batch_size_shows_in_the_rank(size: int) -> None:
    model = vit()
    update = local_update(model, [(photos(size), torch.arange(size))], Protocol())
    assert batch_size_from_rank(update, model) == size


def test_a_batch_too_large_for_the_rank_is_an_error_that_says_so() -> None:
    model = vit()
    update = local_update(model, [(photos(12), torch.arange(12) % 8)], Protocol())
    with pytest.raises(AttackError, match="grant batch_size"):
        batch_size_from_rank(update, model)


def test_the_rank_of_a_matrix_with_a_little_noise() -> None:
    coin = torch.Generator().manual_seed(0)
    a = torch.randn(20, 3, generator=coin) @ torch.randn(3, 30, generator=coin)
    assert numerical_rank(a + 1e-7 * torch.randn(20, 30, generator=coin)) == 3

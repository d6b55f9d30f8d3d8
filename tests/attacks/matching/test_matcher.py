"""Matchers: both ways to differentiate agree."""

from __future__ import annotations

import copy

import pytest
import torch

from fedsim.attacks.matching.matcher import GradientMatcher, Way, silence
from fedsim.attacks.matching.objectives import (
    Cosine,
    LayerL2,
    Objective,
    PositionCosine,
    SquaredL2,
    Tag,
)
from fedsim.attacks.matching.priors import FeaturePrior, running_statistics
from fedsim.core.errors import AttackError
from fedsim.core.spec import ModelSpec
from tests.attacks.matching.conftest import RESNET, VIT, cosine, model_of, pictures, target_of


@pytest.mark.parametrize("spec", [VIT, RESNET], ids=["vit", "resnet"])
@pytest.mark.parametrize(
    "objective",
    [Cosine(), SquaredL2(), LayerL2(), Tag(0.01)],
    ids=["cosine", "l2", "layer_l2", "tag"],
)
def test_first_order_agrees_with_double_backward(spec: ModelSpec, objective: Objective) -> None:
    model, labels = model_of(spec), torch.tensor([0, 3])
    target = target_of(model, pictures(2, 1), labels)
    found = {}
    ways: tuple[Way, ...] = ("first_order", "double")
    for way in ways:
        matcher = GradientMatcher(copy.deepcopy(model), target, objective, way=way)
        found[way] = matcher(pictures(2, 2)[None], labels[None])
    fast, exact = found["first_order"], found["double"]
    assert float(fast.value) == pytest.approx(float(exact.value), rel=1e-4)
    assert cosine(fast.images, exact.images) > 0.999
    assert float(fast.images.norm()) == pytest.approx(float(exact.images.norm()), rel=0.02)


def test_gradients_that_share_memory_do_not_disturb_each_other() -> None:
    # With one image, the gradients of class token and position embedding are views of one tensor.
    model, labels = model_of(VIT), torch.tensor([1])
    target = target_of(model, pictures(1, 1), labels)
    objective = PositionCosine(Cosine(), "pos_embed", 0.5)
    fast = GradientMatcher(copy.deepcopy(model), target, objective, way="first_order")
    exact = GradientMatcher(copy.deepcopy(model), target, objective, way="double")
    start = pictures(1, 2)[None]
    assert cosine(fast(start, labels[None]).images, exact(start, labels[None]).images) > 0.999


def test_soft_labels_are_differentiated_too() -> None:
    model, labels = model_of(VIT), torch.tensor([1, 4])
    target = target_of(model, pictures(2, 1), labels)
    logits = torch.randn(1, 2, 5, generator=torch.Generator().manual_seed(3))
    ways: tuple[Way, ...] = ("first_order", "double")
    found = [
        GradientMatcher(copy.deepcopy(model), target, SquaredL2(), way=way)(
            pictures(2, 2)[None], logits
        )
        for way in ways
    ]
    assert found[0].labels is not None
    assert found[1].labels is not None
    assert cosine(found[0].labels, found[1].labels) > 0.999


def test_features_come_with_the_same_pass_and_the_same_derivative() -> None:
    model, labels = model_of(RESNET), torch.tensor([0, 3])
    target = target_of(model, pictures(2, 1), labels)
    ways: tuple[Way, ...] = ("first_order", "double")
    found = []
    for way in ways:
        prior = FeaturePrior(running_statistics(model), weight=10.0)
        matcher = GradientMatcher(
            copy.deepcopy(model), target, SquaredL2(), way=way, features=prior
        )
        found.append(matcher(pictures(2, 2)[None], labels[None]))
    assert cosine(found[0].images, found[1].images) > 0.999
    bare = GradientMatcher(copy.deepcopy(model), target, SquaredL2(), way="double")
    alone = bare(pictures(2, 2)[None], labels[None])
    assert cosine(alone.images, found[1].images) < 0.999
    # What the derivative is of: the loss, and beside it the prior.
    assert alone.beside is None
    assert torch.equal(found[1].value, alone.value)
    assert found[1].beside is not None
    assert float(found[1].whole - alone.value) == pytest.approx(float(found[1].beside))
    assert found[0].beside is not None
    assert float(found[0].beside) == pytest.approx(float(found[1].beside), rel=1e-2)


def test_eight_seeds_as_one_batch_are_eight_seeds() -> None:
    model, labels = model_of(VIT), torch.tensor([2])
    target = target_of(model, pictures(1, 1), labels)
    matcher = GradientMatcher(model, target, Cosine(), way="first_order")
    starts = torch.stack([pictures(1, seed) for seed in range(10, 18)])
    one_by_one = matcher(starts, labels.expand(8, -1))
    together = matcher.batched(starts, labels.expand(8, -1))
    assert torch.allclose(one_by_one.value, together.value, atol=1e-5)
    for seed in range(8):
        assert cosine(one_by_one.images[seed], together.images[seed]) > 0.999


def test_dropout_is_switched_off_and_said() -> None:
    spec = ModelSpec(options={**VIT.options, "proj_drop_rate": 0.2, "drop_path_rate": 0.1})
    model, labels = model_of(spec), torch.tensor([1])
    target = target_of(model_of(VIT), pictures(1, 1), labels)
    matcher = GradientMatcher(model, target, Cosine(), way="first_order")
    assert "dropout" in matcher.notes[0]
    start = pictures(1, 2)[None]
    assert torch.equal(matcher(start, labels[None]).value, matcher(start, labels[None]).value)
    assert silence(model_of(VIT)) == []


def test_mixed_precision_needs_double_and_works_there() -> None:
    model, labels = model_of(VIT), torch.tensor([1])
    target = target_of(model, pictures(1, 1), labels)
    with pytest.raises(AttackError, match="engine: double"):
        GradientMatcher(model, target, Cosine(), way="first_order", precision="bfloat16")
    low = GradientMatcher(
        copy.deepcopy(model), target, Cosine(), way="double", precision="bfloat16"
    )
    full = GradientMatcher(copy.deepcopy(model), target, Cosine(), way="double")
    start = pictures(1, 2)[None]
    assert cosine(low(start, labels[None]).images, full(start, labels[None]).images) > 0.9


@pytest.mark.slow
def test_a_compiled_search_takes_the_same_steps() -> None:
    model, labels = model_of(VIT), torch.tensor([1])
    target = target_of(model, pictures(1, 1), labels)
    plain = GradientMatcher(copy.deepcopy(model), target, Cosine())
    compiled = GradientMatcher(copy.deepcopy(model), target, Cosine(), compiled=True)
    start = pictures(1, 2)[None]
    assert cosine(plain(start, labels[None]).images, compiled(start, labels[None]).images) > 0.999


def test_seeds_of_a_network_with_kinks_are_not_batched() -> None:
    spec = ModelSpec(name="convnet", options={"channels": [8, 8]})
    model, labels = model_of(spec), torch.tensor([1])
    target = target_of(model, pictures(1, 1), labels)
    assert not GradientMatcher(model, target, Cosine()).batchable
    smooth = model_of(VIT)
    assert GradientMatcher(smooth, target_of(smooth, pictures(1, 1), labels), Cosine()).batchable


def test_coins_in_somebodys_forward_are_silenced_and_told() -> None:
    model = model_of(ModelSpec(name="tests.tutorials:Chain", options={"drop": 0.5})).train()
    images = pictures(1, 1)
    assert not torch.equal(model(images), model(images))
    assert silence(model) == ["Chain"]
    assert torch.equal(model(images), model(images))


@pytest.mark.parametrize(
    ("name", "alike"),
    [("HandWrittenViT", 0.99), ("TutorialViT", 0.2)],  # with ReLUs that are on no tape: `auto` sees
)
def test_attention_of_somebodys_own_is_differentiated_twice(name: str, alike: float) -> None:
    model, labels = model_of(ModelSpec(name=f"tests.tutorials:{name}")), torch.tensor([1])
    target = target_of(model, pictures(1, 1), labels)
    start = pictures(1, 2)[None]
    ways: tuple[Way, ...] = ("double", "first_order")
    double, first = (
        GradientMatcher(copy.deepcopy(model), target, Cosine(), way=way)(start, labels[None])
        for way in ways
    )
    assert cosine(first.images, double.images) > alike
    ahead = GradientMatcher(copy.deepcopy(model), target, Cosine(), way="double")
    slope = double.images[0] / double.images.norm()
    near, far = (ahead.value(start + sign * 1e-2 * slope, labels[None]) for sign in (-1, 1))
    assert float((far - near) / 2e-2) == pytest.approx(float(double.images.norm()), rel=0.05)

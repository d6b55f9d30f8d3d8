"""SPEAR: whole batches from the gradient of one linear layer, exactly, and what stops it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedsim.attacks import create_attack
from fedsim.core.attack import Reconstruction
from fedsim.core.errors import AttackError
from fedsim.core.learning import local_update
from fedsim.core.metrics import psnr
from fedsim.core.models import build_model
from fedsim.core.observation import Observation, Public
from fedsim.core.spec import ModelSpec, Spec, TrainSpec
from tests.staging import attack, observe, photos

MLP = ModelSpec(name="mlp", options={"hidden": [300]})
ROWS = [3, 70, 130, 200, 260, 310, 400, 470]  # of eight photographs


def worst(images: Tensor, result: Reconstruction) -> float:
    """The least PSNR over the true pictures, each against what is nearest to it."""
    return min(float(psnr(image[None].expand_as(result.images), result.images).max())
               for image in images)  # fmt: skip


def matched(images: Tensor, labels: Tensor, result: Reconstruction) -> list[int]:
    """The labels recovered, in the order of the true pictures."""
    nearest = [int(psnr(i[None].expand_as(result.images), result.images).argmax()) for i in images]
    assert sorted(nearest) == list(range(len(labels)))
    assert result.labels is not None
    return result.labels[nearest].tolist()


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_a_whole_batch_comes_back_exactly_with_its_labels(batch: int) -> None:
    images, labels = photos(16, ROWS[:batch])
    result = attack(observe(MLP, images, labels), "spear", snap=False)
    assert worst(images, result) > 120
    assert matched(images, labels, result) == labels.tolist()
    assert result.loss is not None
    assert result.loss < 1e-6
    assert f"{batch} of {batch} pictures found" in " ".join(result.notes)


def test_pictures_near_the_8_bit_grid_are_moved_onto_it() -> None:
    images, labels = photos(16, ROWS[:4])
    result = attack(observe(MLP, images, labels), "spear")
    assert worst(images, result) == 160
    assert any("4 moved onto the 8-bit grid" in note for note in result.notes)


@pytest.mark.parametrize("name", ["CalledRelu", "InPlaceRelu"])
def test_the_first_layer_is_found_by_what_it_does(name: str) -> None:
    images, labels = photos(16, ROWS[:4])
    spec = ModelSpec(name=f"tests.perceptrons:{name}")
    result = attack(observe(spec, images, labels), "spear", snap=False)
    assert worst(images, result) > 120
    assert matched(images, labels, result) == labels.tolist()


def test_a_norm_behind_the_relu_costs_the_labels_alone() -> None:
    images, labels = photos(16, ROWS[:4])
    spec = ModelSpec(name="tests.perceptrons:NormedBehind")
    result = attack(observe(spec, images, labels), "spear", snap=False)
    assert worst(images, result) > 120
    assert result.labels is None
    assert any("BatchNorm mixes" in note for note in result.notes)


def test_layers_behind_the_first_do_not_matter() -> None:
    deep = ModelSpec(name="mlp", options={"hidden": [300, 60, 40]})
    images, labels = photos(16, ROWS[:4])
    result = attack(observe(deep, images, labels), "spear", snap=False)
    assert worst(images, result) > 110
    assert matched(images, labels, result) == labels.tolist()


def test_two_classes_whose_columns_cancel_each_other_are_told_by_their_sides() -> None:
    """Columns of D are then multiples of one vector but for their zeros, and differences of two
    have more zeros than either."""
    images, labels = photos(16, ROWS[:4])
    spec = ModelSpec(name="mlp", options={"hidden": [400]})
    net = build_model(spec, image_size=16, num_classes=2, seed=0)
    public = Public.of(Spec(model=spec, data={"image_size": 16}, train={"batch_size": 4}), 2)  # type: ignore[arg-type]
    update = local_update(net, [(images, labels % 2)], public.protocol)
    result = attack(Observation(1, 0, net.state_dict(), update, public), "spear", snap=False)
    assert worst(images, result) > 100
    assert matched(images, labels, result) == (labels % 2).tolist()


def test_a_picture_that_is_there_twice_is_found_once() -> None:
    images, labels = photos(16, [3, 3, 70])
    result = attack(observe(MLP, images, labels), "spear", snap=False)
    assert len(result.images) == 2
    assert worst(images, result) > 100
    assert any("the gradient shows 2 directions" in note for note in result.notes)


# -- what is uploaded -----------------------------------------------------------------------------

ONE_STEP = TrainSpec(upload="delta", local_steps=1, batch_size=4, lr=0.1, weight_decay=0.01)


def test_a_weight_delta_of_one_step_is_a_gradient() -> None:
    images, labels = photos(16, ROWS[:4])
    result = attack(observe(MLP, images, labels, ONE_STEP), "spear", threat="C", snap=False)
    assert worst(images, result) > 90
    assert matched(images, labels, result) == labels.tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [({"local_steps": 3}, "a delta of 3 steps"), ({"optimizer": "adam"}, "adam scales every")],
)
def test_other_deltas_are_declined(change: dict, words: str) -> None:
    images, labels = photos(16, ROWS[:4])
    train = ONE_STEP.model_copy(update=change)
    with pytest.raises(AttackError, match=words):
        attack(observe(MLP, images, labels, train), "spear", threat="C")


def noisy(relative: float) -> tuple[Observation, Tensor]:
    images, labels = photos(16, ROWS[:4])
    observation = observe(MLP, images, labels)
    coin = torch.Generator().manual_seed(0)
    for tensor in observation.update.tensors.values():
        size = relative * tensor.square().mean().sqrt()
        tensor += size * torch.randn(tensor.shape, generator=coin)
    return observation, images


def test_noise_is_told_in_the_residual() -> None:
    observation, images = noisy(1e-3)
    result = attack(observation, "spear", snap=False)
    assert result.loss == pytest.approx(1e-3, rel=0.2)  # the noise itself is not explained
    assert 50 < worst(images, result) < 100
    assert any("they are not exact" in note for note in result.notes)


def test_much_noise_is_declined() -> None:
    with pytest.raises(AttackError, match="no picture came out of 128 starts: noise"):
        attack(noisy(1.0)[0], "spear", starts=128)


def test_one_picture_comes_out_of_any_noise_as_far_as_it_goes() -> None:
    images, labels = photos(16, ROWS[:1])
    observation = observe(MLP, images, labels)
    coin = torch.Generator().manual_seed(0)
    for tensor in observation.update.tensors.values():
        tensor += 0.5 * tensor.square().mean().sqrt() * torch.randn(tensor.shape, generator=coin)
    result = attack(observation, "spear")
    assert result.loss is not None
    assert result.loss > 0.3
    assert any("they are not exact" in note for note in result.notes)


def test_where_some_are_found_they_are_given_and_counted() -> None:
    images, labels = photos(16, range(0, 480, 40))
    result = attack(observe(MLP, images, labels), "spear", snap=False, starts=24)
    nearest = torch.stack([psnr(i[None].expand_as(result.images), result.images) for i in images])
    assert 2 < len(result.images) < len(images)
    assert len(nearest.argmax(0).unique()) == len(result.images)
    assert float(nearest.amax(0).min()) > 25
    assert f"{len(result.images)} of 12 pictures found, in 24 starts" in result.notes
    assert any("pictures found are approximate" in note for note in result.notes)
    assert result.loss is not None
    assert result.loss > 0.1


def test_directions_that_contradict_the_gradient_are_not_called_pictures() -> None:
    """Of two pictures nearly the same, mixtures pass for one as well."""
    images, labels = photos(16, ROWS[:4])
    coin = torch.Generator().manual_seed(0)
    twin = (images[:1] + 0.01 * torch.rand(images[:1].shape, generator=coin)).clamp(0, 1)
    both = torch.cat([images, twin]), torch.cat([labels, labels[:1]])
    result = attack(observe(MLP, *both), "spear", snap=False, starts=256)
    assert result.loss is not None
    assert result.loss > 0.1
    assert not any("pictures found, in" in note for note in result.notes)
    assert any("contradict the gradient" in note for note in result.notes)


# -- what it cannot work on -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        (ModelSpec(name="convnet"), {}, "begins with a linear layer on the whole picture"),
        (ModelSpec(options={"patch_size": 8, "depth": 1}), {}, "begins with a linear layer"),
        (ModelSpec(name="mlp", options={"activation": "gelu"}), {}, "needs a ReLU right behind"),
        (ModelSpec(name="mlp", options={"activation": "leaky_relu"}), {}, "needs a ReLU right"),
        (ModelSpec(name="mlp", options={"bias": False}), {}, "its layer has no bias"),
        (ModelSpec(name="tests.perceptrons:NormedMlp"), {}, "a norm or a dropout"),
        (ModelSpec(name="tests.perceptrons:DroppedMlp"), {}, "a norm or a dropout"),
        (ModelSpec(name="mlp", options={"hidden": [6]}), {"batch_size": 8}, "fewer pictures than"),
        (MLP, {"upload": "delta", "local_steps": 2}, "a delta of 2 steps"),
        (MLP, {"upload": "delta", "local_steps": 1, "optimizer": "adamw"}, "adamw scales"),
    ],
)
def test_what_it_cannot_work_on_is_declined_before_a_round(
    model: ModelSpec, change: dict, words: str
) -> None:
    train = TrainSpec(**change)
    public = Public.of(Spec(model=model, data={"image_size": 16}, train=train), 8)  # type: ignore[arg-type]
    net = build_model(model, image_size=16, num_classes=8, seed=0)
    with pytest.raises(AttackError, match=words):
        create_attack("spear").check_model(net, public)
    assert net.training  # left as it was


def test_a_dropout_that_rests_is_no_obstacle() -> None:
    model = ModelSpec(name="tests.perceptrons:DroppedMlp")
    public = Public.of(Spec(model=model, data={"image_size": 16}, train={"mode": "eval"}), 8)  # type: ignore[arg-type]
    net = build_model(model, image_size=16, num_classes=8, seed=0)
    assert create_attack("spear").check_model(net, public) is None


def test_a_first_layer_that_nobody_trains_is_declined_before_a_round() -> None:
    public = Public.of(Spec(model=MLP, data={"image_size": 16}), 8)  # type: ignore[arg-type]
    net = build_model(MLP, image_size=16, num_classes=8, seed=0)
    net.get_submodule("1").requires_grad_(False)
    with pytest.raises(AttackError, match=r"needs the gradient of 1\.weight and 1\.bias"):
        create_attack("spear").check_model(net, public)


def test_a_first_layer_that_was_withheld_is_declined() -> None:
    images, labels = photos(16, ROWS[:2])
    observation = observe(MLP, images, labels)
    rest = {n: t for n, t in observation.update.tensors.items() if n != "1.bias"}
    held = replace(observation, update=replace(observation.update, tensors=rest))
    with pytest.raises(AttackError, match=r"needs the gradient of 1\.bias"):
        attack(held, "spear")


def test_a_gradient_of_zeros_is_declined() -> None:
    images, labels = photos(16, ROWS[:2])
    observation = observe(MLP, images, labels)
    for tensor in observation.update.tensors.values():
        tensor.zero_()
    with pytest.raises(AttackError, match="the first layer's gradient is zero"):
        attack(observation, "spear")


def test_the_true_batch_is_not_needed() -> None:
    assert create_attack("spear").needs.isdisjoint({"oracle_labels", "surrogate", "tampering"})

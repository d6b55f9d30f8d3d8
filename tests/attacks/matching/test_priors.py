"""Priors: each equals its formula on a case by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedsim.attacks.matching.priors import (
    FeaturePrior,
    GroupConsistency,
    PatchPrior,
    PriorNetwork,
    batch_statistics,
    l2_norm,
    registered_mean,
    running_statistics,
    slots_matched,
    total_variation,
    total_variation_norm,
)
from fedsim.core.errors import AttackError
from fedsim.core.learning import Protocol, local_update
from fedsim.core.models import build_model
from fedsim.core.natural import natural_pictures
from fedsim.core.prior_networks import load_prior
from fedsim.core.spec import ModelSpec, PriorSpec
from tests.attacks.matching.conftest import pictures

COLUMNS = torch.tensor([[[[[0.0, 1.0], [0.0, 1.0]]]]])  # one seed, one image, one channel


def test_total_variation_by_hand() -> None:
    assert float(total_variation(COLUMNS)) == pytest.approx(1.0)  # across 1, down 0


def test_total_variation_norm_by_hand() -> None:
    # across: (1, 1) -> sqrt 2; down: 0; both diagonals: one difference of 1 each
    assert float(total_variation_norm(COLUMNS)) == pytest.approx(2**0.5 + 2)


def test_l2_by_hand_and_by_seed() -> None:
    images = torch.stack([torch.full((1, 1, 2, 2), 1.0), torch.full((1, 1, 2, 2), 2.0)])
    assert l2_norm(images).tolist() == pytest.approx([2.0, 4.0])


def test_patch_prior_by_hand() -> None:
    # Patches of 2x2 in a 4x4 picture: left half 0, right half 1; one border across, jump 1 in
    # each of 4 rows: norm 2. Down no jump.
    image = torch.zeros(1, 1, 1, 4, 4)
    image[..., 2:] = 1
    assert float(PatchPrior((2, 2))(image)) == pytest.approx(2.0, abs=1e-6)
    assert float(PatchPrior((2, 2), mean=True)(image)) == pytest.approx(1.0)
    inside = torch.zeros(1, 1, 1, 4, 4)
    inside[..., 1] = 1  # a jump inside a patch does not count; at its border (1 -> 0) it does
    assert float(PatchPrior((2, 2))(inside)) == pytest.approx(2.0, abs=1e-6)


def test_group_consistency_by_hand() -> None:
    images = torch.zeros(2, 1, 1, 1, 4)
    images[1] = 2.0  # the mean is 1: each seed is 4 pixels times 1 away
    assert GroupConsistency()(images).tolist() == pytest.approx([2.0, 2.0])
    assert GroupConsistency()(images[:1]).tolist() == [0.0]


def test_registration_sharpens_the_consensus_of_shifted_seeds() -> None:
    coin = torch.Generator().manual_seed(1)
    picture = torch.nn.functional.interpolate(
        torch.rand(1, 3, 8, 8, generator=coin), size=32, mode="bicubic"
    )[0]
    seeds = torch.stack([picture, picture, picture, torch.roll(picture, (0, 2), dims=(1, 2))])
    lazy, registered = seeds.mean(0), registered_mean(seeds[:, None])[0]
    assert (registered - picture).abs().mean() < 0.1 * (lazy - picture).abs().mean()


def small_batchnorm_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())


def test_the_feature_prior_by_hand() -> None:
    net = small_batchnorm_net()
    images = torch.randn(2, 3, 5, 5)
    features = net[0](images).transpose(0, 1).flatten(1)
    mean, variance = torch.ones(4), torch.full((4,), 2.0)
    prior = FeaturePrior({"1": (mean, variance)}, weight=0.5, first=3.0)
    with prior.listening(net):
        net(images)
        found = prior.penalty()
    expected = (features.mean(1) - mean).norm() + (features.var(1) - variance).norm()
    assert float(found) == pytest.approx(float(0.5 * 3 * expected), rel=1e-5)
    assert not net[1]._forward_pre_hooks


def test_features_of_a_single_number_have_a_mean_and_no_variance() -> None:
    """The last layers of a small picture alone in its batch: one number per channel."""
    model = build_model(ModelSpec(name="resnet18"), image_size=32, num_classes=4, seed=0).eval()
    picture = torch.randn(1, 3, 32, 32, requires_grad=True)
    prior = FeaturePrior(running_statistics(model))
    seen: list[torch.Tensor] = []
    last = model.get_submodule("layer4.1.bn2")
    last.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with prior.listening(model):
        model(picture)
        penalty = prior.penalty()
    (derivative,) = torch.autograd.grad(penalty, picture)
    (features,) = seen
    assert features.shape[2:] == (1, 1)
    mean, variance = last.running_mean, last.running_var
    expected = (features[0, :, 0, 0] - mean).norm() + variance.norm()
    assert float(prior.by_layer()[-1]) == pytest.approx(float(expected), rel=1e-5)
    assert bool(derivative.isfinite().all())


def test_uploaded_buffers_show_the_statistics_of_the_batch() -> None:
    model = build_model(
        ModelSpec(name="resnet18", options={"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8]}),
        image_size=64,
        num_classes=4,
        seed=0,
    )
    images = torch.rand(3, 3, 64, 64)
    update = local_update(model, [(images, torch.tensor([0, 1, 2]))], Protocol())
    found = batch_statistics(model, update)
    model.train()
    features = model.conv1(Protocol().normalise(images)).transpose(0, 1).flatten(1)
    mean, variance = found["bn1"]
    assert torch.allclose(mean, features.mean(1), atol=1e-4)
    assert torch.allclose(variance, features.var(1), atol=1e-4)
    assert found.keys() == running_statistics(model).keys()


def test_without_buffers_there_are_no_statistics_of_the_batch() -> None:
    model = build_model(
        ModelSpec(name="resnet18", options={"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8]}),
        image_size=64,
        num_classes=4,
        seed=0,
    )
    batch = (torch.rand(2, 3, 64, 64), torch.tensor([0, 1]))
    update = local_update(model, [batch], Protocol(batchnorm="local"))
    assert batch_statistics(model, update) == {}
    evaluated = local_update(model, [batch], Protocol(mode="eval"))
    assert batch_statistics(model, evaluated) == {}  # its buffers did not move


def test_the_packaged_prior_network_prefers_natural_pictures_to_noise() -> None:
    from fedsim.clients.data.datasets import load_images
    from fedsim.core.spec import DataSpec

    prior = load_prior(PriorSpec())
    half = (0.5, 0.5, 0.5)
    own = natural_pictures(64)
    network = PriorNetwork(prior.model, half, half, prior.mean, prior.std, own, batch=4)
    photos = load_images(DataSpec(image_size=64), "train")
    natural = torch.stack([photos.image(i) for i in (3, 130, 200, 300)]) * 2 - 1
    noise = torch.randn(natural.shape, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    scores = network(torch.stack([natural, noise]))
    assert float(scores[0]) < 0.8 * float(scores[1])
    assert 0.3 < float(scores[0]) < 3  # what natural pictures have is the unit


def test_a_prior_network_counts_layers_by_what_natural_pictures_have_there() -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    )
    with torch.no_grad():
        wide[2].weight *= 1e4  # a layer that would drown the other
    half = (0.5, 0.5, 0.5)
    own = natural_pictures(32)
    network = PriorNetwork(wide, half, half, half, half, own, size=32, batch=8)
    seen = torch.stack([(some - 0.5) / 0.5 for some in own.split(8)])
    assert float(network(seen).mean()) == pytest.approx(1.0, rel=1e-4)
    layers = torch.stack([network._one(batch) for batch in seen]).mean(0)
    assert layers.tolist() == pytest.approx([0.5, 0.5], rel=1e-4)


def test_seeds_that_hold_the_same_pictures_in_other_slots_agree() -> None:
    first = pictures(4, 5, 8)
    swapped = first[[1, 0, 2, 3]]
    images = torch.stack([first, swapped])
    repeated = torch.tensor([7, 7, 1, 2])
    assert slots_matched(images, repeated).tolist() == [[0, 1, 2, 3], [1, 0, 2, 3]]
    assert slots_matched(images, torch.arange(4)).tolist() == [[0, 1, 2, 3]] * 2
    assert GroupConsistency(labels=repeated)(images).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert float(GroupConsistency(labels=torch.arange(4))(images).min()) > 1


def test_a_prior_network_without_batchnorm_is_declined() -> None:
    half = (0.5, 0.5, 0.5)
    with pytest.raises(AttackError, match="BatchNorm"):
        PriorNetwork(nn.Conv2d(3, 4, 3), half, half, half, half, natural_pictures(32))


def test_the_consensus_is_renewed_at_every_multiple_of_its_share() -> None:
    steps, every = 400, 20
    group = GroupConsistency(registered=True, every=every / steps)
    images, at = torch.rand(2, 1, 3, 4, 4), []
    for step in range(steps):
        before = group._matched
        group(images, step / steps)
        if group._matched != before:
            at.append(step)
    assert at == list(range(0, steps, every))

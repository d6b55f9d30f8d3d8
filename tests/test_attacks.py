"""The attacks, on real photos and small models: what they recover, and what they say when not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from attacks import create_attack
from attacks.labels import labels_from_counts, recover_labels
from attacks.patch_solve import distance_to_8_bit, fold_patches
from attacks.priors import total_variation
from attacks.solvers import ridge_solve
from clients.datasets import load_images
from fedsim.core.attack import Reconstruction, no_progress
from fedsim.core.errors import AttackError, SpecError
from fedsim.core.knowledge import THREATS, View
from fedsim.core.learning import Protocol, Update, local_update
from fedsim.core.metrics import psnr, ssim
from fedsim.core.models import build_architecture, build_model, vit_parts
from fedsim.core.observation import Observation, Public
from fedsim.core.spec import DataSpec, ModelSpec, Spec, TrainSpec

TINY = ModelSpec(options={"patch_size": 8, "depth": 2, "embed_dim": 96})
CPU = torch.device("cpu")


def photos(size: int, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    images = load_images(DataSpec(image_size=size), "train")
    return torch.stack([images.image(r) for r in rows]), torch.tensor(images.labels[list(rows)])


def observe(model: ModelSpec, images, labels, train: TrainSpec | None = None) -> Observation:
    data = DataSpec(image_size=images.shape[-1])
    train = train or TrainSpec(batch_size=len(images))
    public = Public.of(Spec(data=data, model=model, train=train), num_classes=8)
    net = build_model(model, image_size=data.image_size, num_classes=8, seed=0)
    batches = [(images, labels)] * (train.local_steps or 1)
    update = local_update(net, batches, public.protocol)
    return Observation(1, 0, net.state_dict(), update, public)


def attack(observation: Observation, name: str, factory=None, **params) -> Reconstruction:
    """An attack under threat B, its ledger checked against what it said it needs."""
    public = observation.public

    def announced() -> nn.Module:
        spec = ModelSpec.model_validate(public.architecture)
        size, classes = public.image_size, public.num_classes
        return build_architecture(spec, image_size=size, num_classes=classes)

    view = View(observation, THREATS["B"].grants, architecture=factory or announced)
    result = create_attack(name, **params).reconstruct(view, device=CPU, progress=no_progress)
    assert set(view.ledger) <= create_attack(name, **params).needs
    return result


@pytest.mark.parametrize(
    "options",
    [
        {"patch_size": 8, "depth": 2, "embed_dim": 96},
        {"patch_size": 8, "depth": 2, "embed_dim": 96, "class_token": False, "global_pool": "avg"},
    ],
)
def test_patch_solve_recovers_one_image_exactly(options: dict) -> None:
    images, labels = photos(32, [70])
    result = attack(observe(ModelSpec(options=options), images, labels), "patch_solve", snap=False)
    assert float(psnr(images, result.images)) > 80
    assert result.labels is not None
    assert result.labels.tolist() == labels.tolist()


def test_patch_solve_snaps_to_the_stored_pixels_bit_for_bit() -> None:
    images, labels = photos(32, [3])
    result = attack(observe(TINY, images, labels), "patch_solve")
    assert torch.equal(result.images, images)
    assert any("8-bit" in note for note in result.notes)


def test_patch_solve_does_not_snap_what_is_not_near_the_grid() -> None:
    images = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    result = attack(observe(TINY, images, torch.tensor([2])), "patch_solve")
    assert 60 < float(psnr(images, result.images)) < 160
    assert distance_to_8_bit(images) == pytest.approx(0.25, abs=0.02)


def test_patch_solve_survives_a_little_noise_by_its_ridge() -> None:
    images, labels = photos(32, [130])
    observation = observe(TINY, images, labels)
    coin = torch.Generator().manual_seed(0)
    for tensor in observation.update.tensors.values():
        tensor += 1e-3 * tensor.square().mean().sqrt() * torch.randn(tensor.shape, generator=coin)
    chosen = attack(observation, "patch_solve")
    plain = attack(observation, "patch_solve", ridge=0.0)
    assert float(psnr(images, chosen.images)) > 20
    assert float(psnr(images, chosen.images)) >= float(psnr(images, plain.images)) - 0.5


def test_patch_solve_says_when_the_rank_is_too_small() -> None:
    narrow = ModelSpec(options={"patch_size": 4, "depth": 2, "embed_dim": 48})
    images, labels = photos(32, [200])
    result = attack(observe(narrow, images, labels), "patch_solve")
    assert any("rank 47 for 64 patches" in note for note in result.notes)


def test_patch_solve_says_that_a_batch_is_a_blend() -> None:
    images, labels = photos(32, [1, 100])
    result = attack(observe(TINY, images, labels), "patch_solve")
    assert len(result.images) == 2
    assert any("batch of 2" in note for note in result.notes)


def test_patch_solve_declines_without_the_position_gradient() -> None:
    images, labels = photos(32, [1])
    observation = observe(TINY, images, labels)
    del observation.update.tensors["pos_embed"]
    with pytest.raises(AttackError, match="pos_embed"):
        attack(observation, "patch_solve")


def test_patch_solve_declines_numbers_that_are_not_finite() -> None:
    images, labels = photos(32, [1])
    observation = observe(TINY, images, labels)
    observation.update.tensors["pos_embed"][0, 3] = float("inf")
    with pytest.raises(AttackError, match="finite"):
        attack(observation, "patch_solve")


def convnet() -> nn.Module:
    """A small smooth network, for which matching is easy."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(1024, 8),
        )


def test_inverting_gradients_recovers_an_image_far_better_than_a_guess() -> None:
    images, labels = photos(16, [70])
    public = Public.of(Spec(data=DataSpec(image_size=16)), num_classes=8)
    update = local_update(convnet(), [(images, labels)], public.protocol)
    observation = Observation(1, 0, convnet().state_dict(), update, public)
    found = attack(observation, "inverting_gradients", convnet, steps=300, tv=1e-3)
    guess = attack(observation, "prior_only", convnet)
    assert float(psnr(images, found.images)) > float(psnr(images, guess.images)) + 8
    assert float(ssim(images, found.images)) > float(ssim(images, guess.images)) + 0.3
    assert found.trace[-1][1] < found.trace[0][1]
    assert found.labels is not None
    assert found.labels.tolist() == labels.tolist()


def test_inverting_gradients_works_through_attention_and_repeats_itself() -> None:
    images, labels = photos(32, [5])
    observation = observe(TINY, images, labels)
    first = attack(observation, "inverting_gradients", steps=4)
    second = attack(observation, "inverting_gradients", steps=4)
    assert torch.equal(first.images, second.images)
    assert first.loss is not None
    assert first.loss < 1.2


def test_prior_only_never_reads_the_update() -> None:
    images, labels = photos(32, [5])
    observation = observe(TINY, images, labels)
    observation.update.tensors.clear()
    result = attack(observation, "prior_only")
    assert torch.equal(result.images, torch.full_like(images, 0.5))


def test_a_batch_with_repeated_labels_is_counted() -> None:
    model = build_model(TINY, image_size=32, num_classes=8, seed=0)
    images, _ = photos(32, range(0, 480, 60))
    labels = torch.tensor([0, 0, 0, 2, 2, 5, 7, 7])
    update = local_update(model, [(images, labels)], Protocol())
    assert recover_labels(update, model, 8).tolist() == labels.tolist()


def test_labels_are_also_read_from_a_weight_delta() -> None:
    model = build_model(TINY, image_size=32, num_classes=8, seed=0)
    images, labels = photos(32, [300])
    update = local_update(model, [(images, labels)], Protocol(upload="delta"))
    assert recover_labels(update, model, 1).tolist() == labels.tolist()


def test_label_counting_on_a_case_by_hand() -> None:
    # Four samples, p uniform over 4 classes, labels 1, 1, 1, 3: gradient = 1/4 - counts / 4.
    gradient = torch.tensor([0.25, 0.25 - 0.75, 0.25, 0.25 - 0.25])
    assert labels_from_counts(gradient, 4).tolist() == [1, 1, 1, 3]


def test_labels_without_a_head_are_an_error_that_says_so() -> None:
    model = build_model(TINY, image_size=32, num_classes=8, seed=0)
    with pytest.raises(AttackError, match="head"):
        recover_labels(Update("gradient", {}), model, 1)


def test_total_variation_by_hand() -> None:
    images = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])
    assert float(total_variation(images)) == pytest.approx(1.0)  # across 1, down 0


def test_the_ridge_is_small_for_clean_and_large_for_noisy_equations() -> None:
    coin = torch.Generator().manual_seed(0)
    a = (
        torch.randn(60, 30, generator=coin).double()
        @ torch.diag(torch.logspace(0, -5, 30)).double()
    )
    x = torch.randn(30, 8, generator=coin).double()
    noise = torch.randn(60, 8, generator=coin).double()
    clean, noisy = ridge_solve(a, a @ x), ridge_solve(a, a @ x + 1e-2 * noise)
    assert clean.ridge < 1e-12 < noisy.ridge
    assert torch.linalg.norm(clean.x - x) < 1e-6 * torch.linalg.norm(x)
    plain = ridge_solve(a, a @ x + 1e-2 * noise, ridge=0.0)
    assert torch.linalg.norm(noisy.x - x) < 0.1 * torch.linalg.norm(plain.x - x)


def test_folding_patches_undoes_what_the_convolution_sees() -> None:
    model = build_model(TINY, image_size=32, num_classes=8, seed=0)
    parts = vit_parts(model)
    images, _ = photos(32, [9])
    patches = torch.nn.functional.unfold(images, 8, stride=8)[0].T
    assert torch.equal(fold_patches(patches, parts), images[0])


def test_an_unknown_attack_names_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean 'patch_solve'"):
        create_attack("patch_slove")


@pytest.mark.parametrize(
    ("params", "expected"),
    [({"step": 3}, "did you mean 'steps'"), ({"steps": 0}, "steps"), ({"lr": "fast"}, "lr")],
)
def test_a_wrong_parameter_is_one_sentence(params: dict, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        create_attack("inverting_gradients", **params)
    assert expected in str(caught.value)

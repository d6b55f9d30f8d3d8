"""The attacks, on real photos and small models: what they recover, and what they say when not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from attacks import create_attack
from attacks.labels import recover_labels
from attacks.patch_solve import distance_to_8_bit, fold_patches
from attacks.solvers import ridge_solve
from clients.datasets import load_images
from defenses.frozen_pe import FrozenPE
from defenses.sinusoidal_pe import SinusoidalPE
from fedsim.core.attack import Reconstruction, no_progress
from fedsim.core.errors import AttackError, SpecError
from fedsim.core.knowledge import THREATS, PriorModel, View, granted_by
from fedsim.core.learning import Protocol, local_update
from fedsim.core.metrics import psnr, ssim
from fedsim.core.models import build_architecture, build_model, vit_parts
from fedsim.core.observation import Observation, Public
from fedsim.core.spec import DataSpec, ModelSpec, Spec, ThreatSpec, TrainSpec

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


def attack(
    observation: Observation, name: str, factory=None, threat: str = "B", **params
) -> Reconstruction:
    """An attack, its ledger checked against what it said it needs and uses."""
    public = observation.public

    def announced() -> nn.Module:
        spec = ModelSpec.model_validate(public.architecture)
        size, classes = public.image_size, public.num_classes
        return build_architecture(spec, image_size=size, num_classes=classes)

    view = View(observation, THREATS[threat].grants, architecture=factory or announced)
    result = create_attack(name, **params).reconstruct(view, device=CPU, progress=no_progress)
    said = create_attack(name, **params)
    assert set(view.ledger) <= said.needs | getattr(said, "uses", frozenset())
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


def convnet_observation(side: int = 16, picture: int = 70) -> tuple[Observation, torch.Tensor]:
    images, labels = photos(side, [picture])
    public = Public.of(Spec(data=DataSpec(image_size=side)), num_classes=8)
    update = local_update(convnet(), [(images, labels)], public.protocol)
    return Observation(1, 0, convnet().state_dict(), update, public), images


MATCHING = {
    "dlg": {"steps": 120},
    "idlg": {"steps": 80},
    "inverting_gradients": {"steps": 200, "tv": 1e-3},
    "tag": {"steps": 200},
    "deep_inversion": {"steps": 200},
    "grad_inversion": {"steps": 200, "seeds": 2, "preset": "cpu", "tv": 0.001},
}


@pytest.mark.parametrize("name", MATCHING)
def test_matching_attacks_recover_an_image_far_better_than_a_guess(name: str) -> None:
    observation, images = convnet_observation()
    found = attack(observation, name, convnet, **MATCHING[name])
    guess = attack(observation, "prior_only", convnet)
    assert float(psnr(images, found.images)) > float(psnr(images, guess.images)) + 5
    assert float(ssim(images, found.images)) > float(ssim(images, guess.images)) + 0.3
    assert found.trace[-1][1] < found.trace[0][1]
    assert found.labels is not None
    assert found.labels.tolist() == [int(photos(16, [70])[1])]
    assert any("engine: first_order" in note for note in found.notes)


def smooth_vit() -> nn.Module:
    """A ViT of four patches and one block, with positions that matter, as in a trained one."""
    spec = ModelSpec(options={"patch_size": 8, "depth": 1, "num_heads": 3})
    model = build_model(spec, image_size=16, num_classes=8, seed=0)
    with torch.no_grad():
        model.get_parameter("pos_embed").mul_(25)
    return model


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("april", {"alpha": 0.1}),
        ("gradvit", {"preset": "cpu", "cost": "l2", "seeds": 1, "tv": 0.0, "patch": 1e-5}),
    ],
)
def test_attacks_on_transformers_recover_an_image(name: str, params: dict) -> None:
    images, labels = photos(16, [70])
    public = Public.of(Spec(data=DataSpec(image_size=16)), num_classes=8)
    update = local_update(smooth_vit(), [(images, labels)], public.protocol)
    observation = Observation(1, 0, smooth_vit().state_dict(), update, public)
    steps = {"steps": 250, "optimizer": "lbfgs", "lr": 1.0, "schedule": "constant"}
    found = attack(observation, name, smooth_vit, **steps, **params)
    guess = attack(observation, "prior_only", smooth_vit)
    assert float(psnr(images, found.images)) > float(psnr(images, guess.images)) + 8
    assert float(ssim(images, found.images)) > float(ssim(images, guess.images)) + 0.5


@pytest.mark.parametrize("name", ["april", "gradvit", "row_space", "april_closed", "patch_solve"])
def test_attacks_on_transformers_decline_a_convolutional_network(name: str) -> None:
    observation, _ = convnet_observation()
    params = {"steps": 2} if name in ("april", "gradvit") else {}
    with pytest.raises(AttackError, match="Vision Transformers"):
        attack(observation, name, convnet, **params)


def test_gradvit_uses_the_prior_network_in_its_second_phase_only() -> None:
    images, labels = photos(32, [5])
    observation = observe(TINY, images, labels)
    asked = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            asked.append(len(x))
            return self.layers(x)

    half = (0.5, 0.5, 0.5)
    view = View(
        observation,
        THREATS["D"].grants,
        architecture=lambda: build_model(TINY, image_size=32, num_classes=8, seed=0),
        prior=lambda: PriorModel("watched", Watched(), half, half),
    )
    gradvit = create_attack("gradvit", preset="cpu", steps=10, seeds=1)
    gradvit.reconstruct(view, device=CPU, progress=no_progress)
    assert len(asked) == 5  # of ten steps
    assert "priors" in view.ledger


def test_gradvit_says_when_it_has_no_prior_network() -> None:
    images, labels = photos(32, [5])
    result = attack(observe(TINY, images, labels), "gradvit", preset="cpu", steps=2, seeds=1)
    assert any("no image prior" in note for note in result.notes)


def test_the_presets_of_the_papers() -> None:
    gradvit = create_attack("gradvit")
    assert gradvit.steps == 120_000
    assert gradvit.weights() == {
        "matching": 4e-3,
        "image": 0.2,
        "patch": 1e-4,
        "group": 1e-2,
        "l2": 1e-4,
        "tv": 1e-4,
    }
    assert gradvit.phases() == ((0.0, 4e-3), (0.5, 2e-3))
    inversion = create_attack("grad_inversion")
    named = {"matching": 1e-3, "tv": 1e-4, "l2": 1e-6, "bn": 0.1, "group": 0.01, "langevin": 0.2}
    assert {name: inversion.weight(name) for name in named} == named
    assert inversion.budget().langevin == 0.2
    assert (inversion.lr, inversion.warmup) == (0.1, 50)


def test_a_closed_form_is_a_start_for_matching() -> None:
    images, labels = photos(32, [70])
    observation = observe(TINY, images, labels)
    result = attack(observation, "inverting_gradients", init="patch_solve", steps=2, lr=1e-6)
    assert float(psnr(images, result.images)) > 60
    del observation.update.tensors["pos_embed"]
    result = attack(observation, "inverting_gradients", init="patch_solve", steps=2)
    assert any("no closed form to start from" in note for note in result.notes)


def test_only_the_selected_layers_are_matched() -> None:
    images, labels = photos(32, [5])
    observation = observe(TINY, images, labels)
    whole = attack(observation, "inverting_gradients", steps=2)
    part = attack(observation, "inverting_gradients", steps=2, parts=["attention"], blocks=[2, 2])
    assert whole.loss != part.loss
    with pytest.raises(AttackError, match="selection"):
        attack(observation, "inverting_gradients", steps=2, blocks=[7, 9])


def test_an_update_with_missing_layers_is_matched_by_the_rest() -> None:
    observation, images = convnet_observation()
    for name in ("0.weight", "0.bias"):
        del observation.update.tensors[name]
    found = attack(observation, "inverting_gradients", convnet, steps=150, tv=1e-3)
    guess = attack(observation, "prior_only", convnet)
    assert float(psnr(images, found.images)) > float(psnr(images, guess.images)) + 2


def test_matching_declines_an_update_that_is_not_finite() -> None:
    observation, _ = convnet_observation()
    observation.update.tensors["0.weight"][0] = float("nan")
    with pytest.raises(AttackError, match="finite"):
        attack(observation, "inverting_gradients", convnet, steps=2)


def test_matching_declines_layers_the_model_does_not_have() -> None:
    observation, _ = convnet_observation()
    observation.update.tensors["strange.weight"] = torch.ones(2)
    with pytest.raises(AttackError, match="strange"):
        attack(observation, "inverting_gradients", convnet, steps=2)


def test_the_batch_size_is_read_from_the_rank_where_it_is_withheld() -> None:
    images, labels = photos(32, [1, 100, 200])
    observation = observe(TINY, images, labels)
    granted = granted_by(ThreatSpec(model="B", withhold=["batch_size"]))
    view = View(
        observation,
        granted,
        architecture=lambda: build_model(TINY, image_size=32, num_classes=8, seed=0),
    )
    attack_ = create_attack("inverting_gradients", steps=2)
    result = attack_.reconstruct(view, device=CPU, progress=no_progress)
    assert len(result.images) == 3
    assert "batch_size" not in view.ledger
    assert any("batch size 3" in note for note in result.notes)


def test_a_client_that_clips_its_gradient_is_simulated_with_its_clipping() -> None:
    images, labels = photos(16, [70])
    train = TrainSpec(clip=0.01)
    public = Public.of(Spec(data=DataSpec(image_size=16), train=train), num_classes=8)
    update = local_update(convnet(), [(images, labels)], public.protocol)
    observation = Observation(1, 0, convnet().state_dict(), update, public)
    told = attack(observation, "idlg", convnet, threat="C", steps=60)
    untold = attack(observation, "idlg", convnet, threat="B", steps=60)
    assert float(psnr(images, told.images)) > float(psnr(images, untold.images)) + 3


def test_labels_of_a_clipped_batch_are_counted_without_its_scale() -> None:
    model = build_model(TINY, image_size=32, num_classes=8, seed=0)
    images, _ = photos(32, range(0, 480, 120))
    labels = torch.tensor([1, 1, 5, 5])
    protocol = Protocol(clip=0.01)
    update = local_update(model, [(images, labels)], protocol)
    assert recover_labels(update, model, 4, protocol=protocol).tolist() == [1, 1, 5, 5]


def test_oracle_labels_say_how_many_pictures_there_were() -> None:
    observation, _ = several_steps()
    granted = granted_by(ThreatSpec(model="C", oracle_labels=True))
    view = View(observation, granted, architecture=convnet, oracle_labels=torch.tensor([1]))
    result = create_attack("inverting_gradients", steps=2).reconstruct(
        view, device=CPU, progress=no_progress
    )
    assert len(result.images) == 1


# -- several local steps --------------------------------------------------------------------


def several_steps(steps: int = 4) -> tuple[Observation, torch.Tensor]:
    images, labels = photos(16, [70])
    train = TrainSpec(upload="delta", local_steps=steps, lr=0.05)
    public = Public.of(Spec(data=DataSpec(image_size=16), train=train), num_classes=8)
    update = local_update(convnet(), [(images, labels)] * steps, public.protocol)
    return Observation(1, 0, convnet().state_dict(), update, public), images


@pytest.mark.parametrize("local", ["unroll", "surrogate", "single"])
def test_local_steps_are_simulated(local: str) -> None:
    observation, images = several_steps()
    found = attack(
        observation,
        "inverting_gradients",
        convnet,
        threat="C",
        local=local,
        pictures=1,
        steps=150,
        tv=1e-3,
    )
    guess = attack(observation, "prior_only", convnet)
    assert len(found.images) == 1
    margin = 2 if local == "single" else 5  # pretending it was one step costs
    assert float(psnr(images, found.images)) > float(psnr(images, guess.images)) + margin


def test_auto_unrolls_what_it_knows_and_says_what_it_does_not() -> None:
    observation, _ = several_steps()
    told = attack(observation, "inverting_gradients", convnet, threat="C", steps=2)
    assert len(told.images) == 4  # four steps of one picture each
    untold = attack(observation, "inverting_gradients", convnet, threat="B", steps=2)
    assert any("as if it were one gradient step" in note for note in untold.notes)


def test_the_size_of_a_gradient_cannot_be_guessed_from_a_delta() -> None:
    observation, _ = several_steps()
    with pytest.raises(AttackError, match="cosine"):
        attack(observation, "dlg", convnet, threat="B", steps=2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "clip": 1.0},
        {"weight_decay": 0.05, "momentum": 0.9},
    ],
)
def test_patch_solve_survives_local_steps_on_one_image(options: dict) -> None:
    images, labels = photos(32, [70])
    train = TrainSpec(upload="delta", local_steps=5, lr=0.01, **options)
    result = attack(observe(TINY, images, labels, train), "patch_solve", threat="C", snap=False)
    assert float(psnr(images, result.images)) > 45


def test_patch_solve_says_that_adamw_bends_its_system() -> None:
    images, labels = photos(32, [70])
    train = TrainSpec(upload="delta", local_steps=2, lr=0.001, optimizer="adamw")
    result = attack(observe(TINY, images, labels, train), "patch_solve", threat="C")
    assert any("adamw" in note for note in result.notes)


# -- closed forms ---------------------------------------------------------------------------


def prepared(spec: ModelSpec, side: int, prepare) -> nn.Module:
    return prepare(build_model(spec, image_size=side, num_classes=8, seed=0))


WIDE = ModelSpec(options={"patch_size": 8, "depth": 2})


def observe_net(net: nn.Module, spec: ModelSpec, images, labels) -> Observation:
    public = Public.of(Spec(data=DataSpec(image_size=images.shape[-1]), model=spec), num_classes=8)
    update = local_update(net, [(images, labels)], public.protocol)
    weights = {name: tensor.float() for name, tensor in net.state_dict().items()}
    return Observation(1, 0, weights, update, public)


def test_row_space_breaks_a_frozen_random_position_embedding() -> None:
    images, labels = photos(32, [70])
    net = prepared(WIDE, 32, FrozenPE().prepare_model)
    observation = observe_net(net, WIDE, images, labels)
    assert "pos_embed" not in observation.update.tensors
    result = attack(observation, "row_space", lambda: prepared(WIDE, 32, FrozenPE().prepare_model))
    assert float(psnr(images, result.images)) > 35
    assert result.notes == []


def test_row_space_is_stopped_by_positions_of_low_rank_and_says_so() -> None:
    images, labels = photos(64, [70])
    net = prepared(WIDE, 64, SinusoidalPE().prepare_model)
    observation = observe_net(net, WIDE, images, labels)
    result = attack(
        observation, "row_space", lambda: prepared(WIDE, 64, SinusoidalPE().prepare_model)
    )
    assert float(psnr(images, result.images)) < 20
    assert any("underdetermined" in note and "rank" in note for note in result.notes)


def test_row_space_says_when_it_has_too_few_equations() -> None:
    narrow = ModelSpec(options={"patch_size": 4, "depth": 2, "embed_dim": 96})
    images, labels = photos(32, [70])
    result = attack(observe(narrow, images, labels), "row_space")
    assert any("underdetermined" in note and "unknowns" in note for note in result.notes)


PLAIN = ModelSpec(options={"patch_size": 4, "depth": 2, "plain_first_block": True})


def test_april_closed_is_exact_on_architecture_a_in_float64() -> None:
    images, labels = photos(32, [70])
    net = build_model(PLAIN, image_size=32, num_classes=8, seed=0).double()
    result = attack(observe_net(net, PLAIN, images.double(), labels), "april_closed")
    assert float(psnr(images, result.images)) > 80


def test_april_closed_declines_any_other_first_block() -> None:
    images, labels = photos(32, [70])
    with pytest.raises(AttackError, match="plain_first_block"):
        attack(observe(TINY, images, labels), "april_closed")


def test_april_closed_says_what_the_pseudo_inverse_loses() -> None:
    spec = ModelSpec(
        options={"patch_size": 16, "depth": 2, "embed_dim": 96, "plain_first_block": True}
    )
    images, labels = photos(64, [70])
    result = attack(observe(spec, images, labels), "april_closed")
    assert any("96 channels for 768 pixels" in note for note in result.notes)


@pytest.mark.parametrize("activation", ["leaky_relu", "tanh"])
def test_rgap_inverts_a_convolutional_network_layer_by_layer(activation: str) -> None:
    options = {"channels": [12, 16], "strides": [1, 2], "activation": activation}
    spec = ModelSpec(name="convnet", options=options)
    images, labels = photos(8, [70])
    result = attack(observe(spec, images, labels), "rgap")
    assert float(psnr(images, result.images)) > 40


def test_rgap_finds_the_features_without_a_head_bias() -> None:
    options = {"channels": [12], "strides": [1], "activation": "leaky_relu", "head_bias": False}
    spec = ModelSpec(name="convnet", options=options)
    images, labels = photos(8, [70])
    result = attack(observe(spec, images, labels), "rgap")
    assert float(psnr(images, result.images)) > 40


def test_rgap_says_when_a_layer_loses_information() -> None:
    spec = ModelSpec(name="convnet", options={"channels": [2], "strides": [4]})
    images, labels = photos(16, [70])
    result = attack(observe(spec, images, labels), "rgap")
    assert any("underdetermined: rank" in note for note in result.notes)


def test_rgap_declines_what_is_no_plain_chain() -> None:
    images, labels = photos(32, [70])
    with pytest.raises(AttackError, match="plain chains"):
        attack(observe(TINY, images, labels), "rgap")


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

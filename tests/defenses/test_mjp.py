"""The masked jigsaw puzzle: what is hidden, what is learned, what it costs the closed form."""

from __future__ import annotations

import copy

import pytest
import torch

from fedsim.attacks import create_attack
from fedsim.core.anatomy import vit_parts
from fedsim.core.attack import no_progress
from fedsim.core.errors import ModelError
from fedsim.core.knowledge import THREATS, Announced, View
from fedsim.core.learning import Protocol, Trail, learn, local_update
from fedsim.core.metrics import decibel, psnr
from fedsim.core.models import build_model
from fedsim.core.observation import Observation, Public
from fedsim.core.spec import DataSpec, ModelSpec, Spec, TrainSpec, Upload
from fedsim.defenses import create_defense
from fedsim.defenses.applied import announced, countered
from fedsim.defenses.jigsaw import block_mask, rearrange, shuffled_order
from fedsim.defenses.mjp import Mjp, coordinates, puzzle_of
from tests.defenses.conftest import secret
from tests.staging import CPU, photos

VIT = ModelSpec(options={"patch_size": 4, "depth": 2, "embed_dim": 96})


def model(spec: ModelSpec = VIT):
    return build_model(spec, image_size=32, num_classes=8, seed=0)


def test_without_a_mask_the_model_is_the_one_it_was() -> None:
    plain, images = model(), torch.rand(2, 3, 32, 32)
    protected = Mjp().prepare_model(copy.deepcopy(plain))
    assert torch.equal(plain(images), protected(images))
    assert "unk_embed" in dict(protected.named_parameters())


@pytest.mark.parametrize("options", [{}, {"class_token": False, "global_pool": "avg"}])
def test_masked_places_get_the_unknown_position(options: dict) -> None:
    net = Mjp().prepare_model(model(ModelSpec(options={**VIT.options, **options})))
    names = list(dict(net.named_parameters()))
    mask = torch.zeros(64, dtype=torch.bool)
    mask[[3, 17]] = True
    puzzle_of(net).mask = mask
    by_hand = copy.deepcopy(net)
    puzzle_of(by_hand).mask = None
    with torch.no_grad():
        prefix = net.pos_embed.shape[1] - 64
        by_hand.pos_embed[0, prefix:][mask] = net.unk_embed[0]
    images = torch.rand(2, 3, 32, 32)
    assert torch.allclose(net(images), by_hand(images), atol=1e-6)
    assert list(dict(net.named_parameters())) == names


def test_positions_of_masked_places_have_no_gradient_and_the_unknown_one_has() -> None:
    defense = Mjp(dal="none", ratio=0.5, probability=1.0)
    net = defense.prepare_model(model())
    images, labels = photos(32, [70])
    update = local_update(net, [(images, labels)], Protocol(), defenses=[defense], rng=secret(3))
    rows = update.tensors["pos_embed"][0, 1:].abs().sum(1)
    assert int((rows == 0).sum()) == 32
    assert float(update.tensors["unk_embed"].abs().sum()) > 0


def test_localisation_is_the_mean_distance_of_the_coordinates() -> None:
    defense = Mjp(dal="linear", weight=2.0)
    net = defense.prepare_model(model())
    with torch.no_grad():
        for parameter in net.dal_head.parameters():
            parameter.zero_()
    places = coordinates((8, 8))
    assert places[0].tolist() == [0, 0]  # counted, as the authors' targets are
    assert places[-1].tolist() == [7, 7]
    by_hand = 2.0 * places.abs().sum(1).mean()
    assert float(defense.penalty(net)) == pytest.approx(float(by_hand))
    puzzle_of(net).mask = torch.arange(64) >= 8  # the first row of patches remains
    first_row = 2.0 * coordinates((8, 8))[:8].abs().sum(1).mean()
    assert float(defense.penalty(net)) == pytest.approx(float(first_row))


@pytest.mark.parametrize("dal", ["pca", "linear", "mlp2", "mlp"])
def test_localisation_is_learned(dal: str) -> None:
    defense = Mjp(dal=dal, probability=0.0, weight=1.0)
    net = defense.prepare_model(model())
    images, labels = photos(32, [70])
    before = float(defense.penalty(net))
    protocol = Protocol(upload="delta", lr=0.05)
    learn(net, [(images, labels)] * 30, protocol, defenses=[defense], rng=secret())
    assert float(defense.penalty(net)) < 0.9 * before


def test_localisation_alone_is_a_variant() -> None:
    """D of the paper's Table 2: nothing is shuffled, and no position is unknown."""
    defense = Mjp(unknown=False, probability=0.0)
    net = defense.prepare_model(model())
    images, labels = photos(32, [70])
    update = local_update(net, [(images, labels)], Protocol(), defenses=[defense], rng=secret())
    assert puzzle_of(net).mask is None
    assert "unk_embed" not in update.tensors
    assert float(update.tensors["dal_head.0.weight"].abs().sum()) > 0


def test_heads_have_as_many_layers_as_they_say() -> None:
    for kind, layers in (("linear", 1), ("mlp2", 2), ("mlp", 3)):
        head = Mjp(dal=kind).prepare_model(model()).dal_head
        assert sum(isinstance(m, torch.nn.Linear) for m in head.modules()) == layers


def test_pixels_are_scrambled_in_every_patch() -> None:
    images = torch.rand(1, 3, 32, 32)
    net = Mjp(pixels=True, probability=1.0).prepare_model(model())
    shuffled, _ = Mjp(pixels=True, probability=1.0).protect_batch(
        images, torch.tensor([0]), net, secret()
    )
    same = (shuffled == images).all(1)[0].unflatten(0, (8, 4)).unflatten(2, (8, 4))
    assert not bool(same.all(1).all(2).any())


def test_an_index_follows_its_patch_to_its_new_place() -> None:
    defense = Mjp(index=True, unknown=False, dal="none", ratio=0.5, probability=1.0)
    net = defense.prepare_model(model())
    images, labels = photos(32, [70])
    with torch.no_grad():
        net.index_embed.copy_(torch.randn(net.index_embed.shape))
    defense.protect_batch(images, labels, net, secret())
    order = puzzle_of(net).order
    assert order is not None
    assert sorted(order.tolist()) == list(range(64))
    by_hand = copy.deepcopy(net)
    puzzle_of(by_hand).mask = puzzle_of(by_hand).order = None
    with torch.no_grad():
        by_hand.pos_embed[0, 1:] += net.index_embed[0, order]
        by_hand.index_embed.zero_()
    assert torch.allclose(net(images), by_hand(images), atol=1e-5)


def test_the_variants_of_the_paper() -> None:
    images, labels = photos(32, [70])
    for options in (
        {"positions": False},
        {"pixels": True},
        {"unknown": False},
        {"index": True},
        {"dal": "none"},
        {"dal": "mlp2"},
    ):
        defense = Mjp(probability=1.0, **options)
        net = defense.prepare_model(model())
        trail = Trail()
        update = learn(
            net, [(images, labels)], Protocol(), defenses=[defense], rng=secret(), trail=trail
        )
        assert update.is_finite()
        assert any(entry["stage"] == "batch" for entry in trail.entries)
    bare = Mjp(positions=False).prepare_model(model()).eval()
    shuffled = rearrange(images, (8, 8), torch.randperm(64))
    assert torch.allclose(bare(images), bare(shuffled), atol=1e-5)  # no order without positions


def test_before_its_warm_up_is_over_nothing_is_shuffled() -> None:
    defense = Mjp(probability=1.0, warmup=2)
    assert [defense.at_round(n, 0, [0]).probability for n in (1, 2, 3)] == [0.0, 0.0, 1.0]


def test_on_a_convolutional_network_only_the_picture_is_shuffled() -> None:
    net = Mjp().prepare_model(model(ModelSpec(name="resnet10t")))
    images, labels = photos(32, [70, 20])
    moved, same = Mjp(probability=1.0).protect_batch(images, labels, net, secret())
    assert not torch.equal(moved, images)
    assert torch.equal(same, labels)
    assert Mjp().penalty(net) is None


def test_a_network_whose_positions_are_relative_has_its_patches_shuffled_alone() -> None:
    options = {"window_size": 4, "embed_dim": 24, "depths": [1, 1], "num_heads": [2, 2]}
    net = Mjp().prepare_model(
        model(ModelSpec(name="swin_tiny_patch4_window7_224", options=options))
    )
    images, labels = photos(32, [70, 20])
    moved, _ = Mjp(ratio=0.5, probability=1.0).protect_batch(images, labels, net, secret())
    assert puzzle_of(net).grid == (8, 8)
    assert not torch.equal(moved, images)
    assert Mjp().penalty(net) is None
    assert not {"unk_embed", "dal_head"} & {n.split(".")[0] for n in net.state_dict()}


def test_a_model_without_patches_is_refused() -> None:
    with pytest.raises(ModelError, match="finds no patches"):
        Mjp().prepare_model(model(ModelSpec(name="convnet")))


def test_mjp_takes_the_closed_form_apart_where_it_shuffled() -> None:
    images, labels = photos(32, [70])
    defense = Mjp(ratio=0.5, probability=1.0, dal="none")
    results = {}
    for name, defenses in (("plain", []), ("mjp", [defense])):
        net = defense.prepare_model(model())
        spec = Spec(data=DataSpec(image_size=32), model=VIT)
        public = Public.of(spec, num_classes=8)
        update = local_update(
            net, [(images, labels)], public.protocol, defenses=defenses, rng=secret(3)
        )
        observation = Observation(1, 0, net.state_dict(), update, public)
        view = View(
            observation, THREATS["C"].grants, Announced(lambda: defense.prepare_model(model()))
        )
        attack = create_attack("patch_solve")
        results[name] = attack.reconstruct(view, device=CPU, progress=no_progress).images
    assert float(psnr(images, results["plain"])) > 60
    assert float(psnr(images, results["mjp"])) < 25


def test_create_by_name() -> None:
    assert create_defense("mjp", ratio=0.3) == Mjp(ratio=0.3)


def observed(
    defense: Mjp, seed: int = 3, architecture: ModelSpec = VIT, train: TrainSpec | None = None
):
    """One picture's gradient under ``defense``, the true mask, and the picture."""
    images, labels = photos(32, [70])
    net = defense.prepare_model(model(architecture))
    spec = Spec(
        data=DataSpec(image_size=32),
        model=architecture,
        train=train or TrainSpec(),
        defenses=[{"name": "mjp", **vars(defense)}],
    )
    public = Public.of(spec, num_classes=8)
    client = copy.deepcopy(net)
    update = learn(
        client, [(images, labels)], public.protocol, defenses=[defense], rng=secret(seed)
    )
    observation = Observation(1, 0, net.state_dict(), update, public)
    return observation, puzzle_of(client).mask, images


def view_of(observation: Observation, threat: str = "C") -> View:
    return View(
        observation,
        THREATS[threat].grants,
        Announced(
            lambda: announced(observation.public),
            lambda net: countered(observation.update, observation.public.defenses, net),
        ),
    )


@pytest.mark.parametrize(("probability", "gained"), [(0.0, 5), (1.0, 1)])
def test_aprils_closed_form_is_informed_as_well(probability: float, gained: float) -> None:
    plain = ModelSpec(options={"patch_size": 4, "depth": 2, "plain_first_block": True})
    observation, _, images = observed(Mjp(probability=probability), architecture=plain)
    found = {
        adaptive: create_attack("april_closed", adaptive=adaptive).reconstruct(
            view_of(observation), device=CPU, progress=no_progress
        )
        for adaptive in (False, True)
    }
    reached = {adaptive: float(psnr(images, result.images)) for adaptive, result in found.items()}
    assert reached[True] > reached[False] + gained


@pytest.mark.parametrize("init", ["timm", "classic"])
def test_the_unknown_position_begins_as_large_as_the_others(init: str) -> None:
    spec = VIT.model_copy(update={"init": init})
    net = Mjp().prepare_model(build_model(spec, image_size=32, num_classes=8, seed=0))
    assert float(net.unk_embed.detach().std()) == pytest.approx(
        float(net.pos_embed.detach().std()), rel=0.2
    )


@pytest.mark.parametrize("dal", ["none", "linear", "mlp", "pca"])
def test_an_informed_server_reads_the_mask_and_takes_the_localisation_out(dal: str) -> None:
    defense = Mjp(probability=1.0, dal=dal)
    observation, mask, _ = observed(defense)
    net = announced(observation.public)
    net.load_state_dict(observation.weights)
    seen = countered(observation.update, observation.public.defenses, net)
    assert torch.equal(puzzle_of(net).mask, mask)
    plain, _, _ = observed(Mjp(probability=1.0, dal="none"))
    for name, tensor in plain.update.tensors.items():
        assert torch.allclose(seen.update.tensors[name], tensor, atol=2e-6)
    for name in seen.update.tensors.keys() - plain.update.tensors.keys():
        assert float(seen.update.tensors[name].abs().max()) < 1e-6  # the head's own


def test_the_adaptive_closed_form_takes_the_unshuffled_patches_back() -> None:
    observation, mask, images = observed(Mjp(probability=1.0, ratio=0.3))
    results = {
        adaptive: create_attack("patch_solve", adaptive=adaptive).reconstruct(
            view_of(observation), device=CPU, progress=no_progress
        )
        for adaptive in (False, True)
    }
    shown = (~mask).view(8, 8).repeat_interleave(4, 0).repeat_interleave(4, 1)

    def kept(result) -> float:
        apart = ((result.images - images).square() * shown).sum() / (3 * shown.sum())
        return float(decibel(apart))

    assert kept(results[True]) > kept(results[False]) + 2
    assert kept(results[True]) > 18
    assert any("read from zero rows" in note for note in results[True].notes)


def reached(observation: Observation, images: torch.Tensor, **options) -> tuple[float, list[str]]:
    """What the closed form makes of an update, in dB, and what it says."""
    attack = create_attack(options.pop("attack", "patch_solve"), **options)
    found = attack.reconstruct(view_of(observation), device=CPU, progress=no_progress)
    return float(psnr(images, found.images)), found.notes


@pytest.mark.parametrize(
    "train",
    [TrainSpec(clip=0.5), TrainSpec(upload=Upload.DELTA, local_steps=1, lr=0.05)],
    ids=["a client that clips", "one step as a delta"],
)
def test_the_localisation_is_taken_out_at_the_scale_its_head_shows(train: TrainSpec) -> None:
    observation, _, images = observed(Mjp(probability=0.0), train=train)
    informed, _ = reached(observation, images)
    naive, _ = reached(observation, images, adaptive=False)
    assert informed > max(60, naive + 20)


def test_the_mask_of_one_step_is_read_from_a_delta() -> None:
    train = TrainSpec(upload=Upload.DELTA, local_steps=1, lr=0.05)
    observation, mask, _ = observed(Mjp(probability=1.0, ratio=0.3), train=train)
    view = view_of(observation)
    net = view.model()
    view.informed(net)
    assert torch.equal(puzzle_of(net).mask, mask)


def test_what_several_steps_made_of_the_localisation_is_left_in_and_said() -> None:
    train = TrainSpec(upload=Upload.DELTA, local_steps=8, lr=0.5, momentum=0.9)
    observation, _, images = observed(Mjp(probability=0.0, dal="pca"), train=train)
    _, notes = reached(observation, images)
    assert any("localisation is left in" in note for note in notes)


@pytest.mark.parametrize("dal", ["none", "mlp"])
def test_an_index_hands_over_the_order_and_the_picture_is_put_together_again(dal: str) -> None:
    plain = ModelSpec(options={"patch_size": 4, "depth": 2, "plain_first_block": True})
    defense = Mjp(index=True, unknown=False, dal=dal, ratio=0.9, probability=1.0)
    observation, _, images = observed(defense, architecture=plain)
    for attack in ("patch_solve", "april_closed"):
        informed, notes = reached(observation, images, attack=attack)
        naive, _ = reached(observation, images, attack=attack, adaptive=False)
        assert naive < 20 < informed
        assert any("read from `index`" in note for note in notes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"probability": 0.0}, "it never shuffles"),
        ({"probability": 1.0, "unknown": False, "dal": "none"}, "cannot be told"),
        ({"probability": 1.0, "hide": False}, "cannot be told"),
        ({"probability": 1.0, "ratio": 1.0}, "the mask (64 of 64 patches)"),
        ({"probability": 1e-9}, "this batch was not shuffled"),
    ],
)
def test_what_can_be_told_of_a_mask_is_said_and_no_more(options: dict, words: str) -> None:
    observation, mask, _ = observed(Mjp(**options))
    view = view_of(observation)
    net = view.model()
    (note, *_) = view.informed(net).notes
    assert words in note
    if options.get("ratio") == 1.0:
        assert torch.equal(puzzle_of(net).mask, mask)


def test_noise_hides_the_mask_and_nobody_says_that_there_was_none() -> None:
    observation, _, _ = observed(Mjp(probability=1.0))
    for tensor in observation.update.tensors.values():
        tensor += 1e-6 * torch.randn(tensor.shape, generator=secret(5))
    view = view_of(observation)
    (note, *_) = view.informed(view.model()).notes
    assert "cannot be told" in note


def test_a_learned_unknown_embedding_can_be_left_unused() -> None:
    hidden, open_ = (Mjp(probability=1.0, hide=hide) for hide in (True, False))
    nets = [defense.prepare_model(model()) for defense in (hidden, open_)]
    assert set(nets[0].state_dict()) == set(nets[1].state_dict())
    images, labels = photos(32, [70])
    for defense, net in zip((hidden, open_), nets, strict=True):
        defense.protect_batch(images, labels, net, secret())
    plain = model()
    assert not torch.allclose(nets[0](images), plain(images), atol=1e-5)
    assert torch.allclose(nets[1](images), plain(images), atol=1e-5)


def test_without_the_knowledge_of_defenses_nothing_is_countered() -> None:
    observation, _, _ = observed(Mjp(probability=1.0))
    view = view_of(observation, "B")
    net = view.model()
    assert view.informed(net).notes == ()
    assert puzzle_of(net).mask is None
    assert "defenses" not in view.ledger
    knowing = view_of(observation)
    knowing.informed(knowing.model())
    assert "defenses" in knowing.ledger


def test_matching_simulates_the_mask_it_read() -> None:
    """With mask and localisation accounted for, the true shuffled picture matches exactly."""
    from fedsim.attacks.inverting_gradients import InvertingGradients

    defense = Mjp(probability=1.0, dal="mlp")
    observation, mask, images = observed(defense)
    coin = secret(3)
    coin_state = copy.deepcopy(coin)
    float(torch.rand((), generator=coin_state))
    assert torch.equal(block_mask((8, 8), defense.ratio, coin_state), mask)
    shuffled = rearrange(images, (8, 8), shuffled_order(mask, coin_state))
    normalised = observation.public.protocol.normalise(shuffled)[None]
    losses = {}
    for adaptive in (True, False):
        attack = InvertingGradients(adaptive=adaptive, engine="double")
        task = attack.task(view_of(observation), CPU)
        losses[adaptive] = float(task.matcher.value(normalised, task.labels))
    assert losses[True] < 1e-5
    assert losses[False] > 100 * losses[True]


@pytest.mark.parametrize("name", ["TutorialViT", "HandWrittenViT"])
def test_positions_of_somebodys_own_model_are_hidden(name: str) -> None:
    defense = Mjp(dal="none", ratio=0.5, probability=1.0)
    plain = model(ModelSpec(name=f"tests.tutorials:{name}"))
    net, (images, labels) = defense.prepare_model(copy.deepcopy(plain)), photos(32, [70])
    assert torch.equal(plain(images), net(images))
    batch = [(images, labels)]
    update = local_update(net, batch, Protocol(), defenses=[defense], rng=secret())
    position = vit_parts(net).position
    assert position is not None
    rows = update.tensors[position].reshape(-1, update.tensors[position].shape[-1])[-16:]
    assert 0 < int((rows == 0).all(1).sum()) < 16
    assert bool(update.tensors["unk_embed"].any())


@pytest.mark.parametrize("odd", ["TokenLast", "Long", "Grid"])
def test_positions_that_do_not_end_with_the_patches_are_refused(odd: str) -> None:
    with pytest.raises(ModelError, match="ends with those of the patches"):
        Mjp().prepare_model(model(ModelSpec(name=f"tests.oddities:{odd}")))

"""The matching engine: both ways agree, steps and schedules do what they say, nothing is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedsim.attacks.matching.derivatives import choose_way
from fedsim.attacks.matching.local_steps import OptimizerMemory, PathMatcher, UnrolledMatcher
from fedsim.attacks.matching.matcher import GradientMatcher, Matcher, Way, silence
from fedsim.attacks.matching.objectives import (
    Cosine,
    LayerL2,
    Objective,
    PositionCosine,
    SquaredL2,
    Tag,
    Target,
)
from fedsim.attacks.matching.priors import (
    FeaturePrior,
    GroupConsistency,
    Term,
    running_statistics,
    total_variation,
)
from fedsim.attacks.matching.search import Budget, search
from fedsim.attacks.matching.smooth_modules import as_matrix, tape_kinks
from fedsim.attacks.matching.spaces import Pixels
from fedsim.core.attack import Progress, no_progress
from fedsim.core.errors import AttackError
from fedsim.core.learning import Protocol, local_update
from fedsim.core.models import build_model
from fedsim.core.notebook import Notebook
from fedsim.core.spec import ModelSpec

VIT = ModelSpec(options={"patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3})
RESNET = ModelSpec(
    name="resnet18",
    options={"layers": [1, 1, 1, 1], "channels": [8, 16, 16, 16], "output_stride": 8},
)


def model_of(spec: ModelSpec, side: int = 32) -> nn.Module:
    return build_model(spec, image_size=side, num_classes=5, seed=0).train()


def target_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Target:
    update = local_update(model, [(images, labels)], Protocol(mean=(0, 0, 0), std=(1, 1, 1)))
    return Target(update.tensors)


def pictures(count: int, seed: int, side: int = 32) -> torch.Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(F.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0))


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
    assert cosine(bare(pictures(2, 2)[None], labels[None]).images, found[1].images) < 0.999


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


def test_kinks_are_held_between_the_two_passes() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
    plain, taped = copy.deepcopy(net), copy.deepcopy(net)
    tape = tape_kinks(taped)
    images = pictures(2, 0, 8)
    tape.record()
    assert torch.equal(taped(images), plain(images))
    choices = tape.choices
    tape.replay(choices)
    assert torch.allclose(taped(images), plain(images))

    def held(scale: float) -> torch.Tensor:
        tape.replay(choices)
        return taped(scale * images)

    # With the choices held the network is affine: equal steps in, equal steps out.
    assert torch.allclose(held(3) - held(2), held(2) - held(1), atol=1e-4)
    assert not torch.allclose(plain(-3 * images), held(-3), atol=1e-4)


def test_a_patch_projection_is_a_matrix_product() -> None:
    model = model_of(VIT).eval()
    images = pictures(2, 0)
    before, names = model(images), [n for n, _ in model.named_parameters()]
    as_matrix(model)
    assert torch.allclose(model(images), before, atol=1e-5)
    assert [n for n, _ in model.named_parameters()] == names


PROTOCOLS = {
    "plain": Protocol(upload="delta", lr=0.1),
    "momentum and decay": Protocol(upload="delta", lr=0.05, momentum=0.9, weight_decay=0.1),
    "clipped": Protocol(upload="delta", lr=0.1, momentum=0.5, clip=0.1),
}


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 4))


@pytest.mark.parametrize("name", [*PROTOCOLS, "adamw"])
def test_the_unrolled_client_is_the_real_client(name: str) -> None:
    adamw = Protocol(upload="delta", optimizer="adamw", lr=0.01, weight_decay=0.1)
    protocol = PROTOCOLS.get(name, adamw)
    protocol = Protocol(**{**protocol.__dict__, "mean": (0, 0, 0), "std": (1, 1, 1)})
    images, labels = pictures(4, 0, 4), torch.tensor([0, 1, 2, 3])
    rows = [[0, 1], [2, 3], [0, 1]]
    batches = [(images[r], labels[r]) for r in rows]
    update = local_update(tiny(), batches, protocol)
    target = Target(update.tensors)
    matcher = UnrolledMatcher(
        tiny(), target, SquaredL2(), way="double", protocol=protocol, batches=rows
    )
    assert float(matcher.value(images[None], labels[None])) < 1e-8


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_adjoint_of_local_steps_is_double_backward(name: str) -> None:
    protocol = PROTOCOLS[name]
    images, labels, rows = pictures(4, 0, 4), torch.tensor([0, 1, 2, 3]), [[0, 1], [2, 3], [1, 2]]
    batches = [(images[r], labels[r]) for r in rows]
    target = Target(local_update(tiny(), batches, protocol).tensors)
    ways: tuple[Way, ...] = ("first_order", "double")
    found = [
        UnrolledMatcher(tiny(), target, Cosine(), way=way, protocol=protocol, batches=rows)(
            pictures(4, 5, 4)[None], labels[None]
        )
        for way in ways
    ]
    assert float(found[0].value) == pytest.approx(float(found[1].value), rel=1e-4)
    assert cosine(found[0].images, found[1].images) > 0.999


def test_a_surrogate_point_explains_several_steps_better_than_the_start() -> None:
    protocol = Protocol(upload="delta", lr=0.5, mean=(0, 0, 0), std=(1, 1, 1))
    images, labels = pictures(4, 0, 4), torch.tensor([0, 1, 2, 3])
    update = local_update(tiny(), [(images, labels)] * 8, protocol)
    target = Target({n: -t for n, t in update.tensors.items()})
    start = GradientMatcher(tiny(), target, Cosine())
    between = PathMatcher(tiny(), target, Cosine(), delta=update.tensors)
    truth, classes = images[None], labels[None]
    assert float(between.value(truth, classes)) < 0.5 * float(start.value(truth, classes))


def test_the_optimiser_of_the_simulator_repeats_torch() -> None:
    protocol = Protocol(upload="delta", optimizer="adamw", lr=0.01, weight_decay=0.1)
    weight = torch.randn(5)
    mine, memory = [weight.clone()], OptimizerMemory(protocol)
    theirs = nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1)
    for step in range(3):
        gradient = torch.randn(5, generator=torch.Generator().manual_seed(step))
        theirs.grad = gradient.clone()
        optimizer.step()
        mine = memory.step(mine, [gradient])
    assert torch.allclose(mine[0], theirs, atol=1e-6)


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


# -- the choice of the way ------------------------------------------------------------------


class Kinked(nn.Module):
    """A network whose second derivative the difference of two passes cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steep = torch.sin(3e5 * self.head.weight.sum() * x.flatten(1).mean(1, keepdim=True))
        return self.head(x.flatten(1)) + steep


def test_auto_takes_first_order_where_it_agrees_and_double_where_not() -> None:
    labels = torch.tensor([1])

    def maker(model: nn.Module, target: Target) -> Callable[[Way], Matcher]:
        return lambda way: GradientMatcher(copy.deepcopy(model), target, Cosine(), way=way)

    smooth = tiny()
    target = target_of(smooth, pictures(1, 1, 4), labels)
    start = pictures(1, 2, 4)[None]
    matcher, words = choose_way(maker(smooth, target), "auto", start, labels[None])
    assert matcher.way == "first_order"
    assert "first_order" in words

    torch.manual_seed(0)
    rough = Kinked()
    target = target_of(rough, pictures(1, 1, 4), labels)
    matcher, words = choose_way(maker(rough, target), "auto", start, labels[None])
    assert matcher.way == "double"
    assert "disagrees" in words
    matcher, _ = choose_way(maker(rough, target), "first_order", start, labels[None])
    assert matcher.way == "first_order"


# -- the search -----------------------------------------------------------------------------

LOW, HIGH = torch.full((3, 1, 1), -1.0), torch.full((3, 1, 1), 1.0)


def problem() -> tuple[nn.Module, Target, torch.Tensor, torch.Tensor]:
    model, truth, labels = tiny(), pictures(1, 1, 4).clamp(-1, 1), torch.tensor([2])
    return model, target_of(model, truth, labels), truth, labels[None]


def matcher_of(model: nn.Module, target: Target) -> Matcher:
    return GradientMatcher(copy.deepcopy(model), target, Cosine())


@pytest.mark.parametrize("optimizer", ["adam", "signed", "lbfgs"])
def test_every_kind_of_step_lowers_the_loss(optimizer: str) -> None:
    model, target, _, labels = problem()
    budget = Budget(60, lr=1.0 if optimizer == "lbfgs" else 0.05, optimizer=optimizer)  # type: ignore[arg-type]
    start = pictures(1, 2, 4)[None]
    found = search(
        matcher_of(model, target), Pixels(start, LOW, HIGH), labels, budget, progress=no_progress
    )
    assert found.loss < 0.4 * float(matcher_of(model, target).value(start, labels))
    assert float(found.images.min()) >= -1
    assert float(found.images.max()) <= 1


def test_the_best_iterate_is_that_of_the_matching_loss() -> None:
    model, target, _, labels = problem()
    start = pictures(1, 2, 4)[None]
    flat = Term("tv", 100.0, total_variation)  # drags the images away from the match
    found = search(
        matcher_of(model, target),
        Pixels(start, LOW, HIGH),
        labels,
        Budget(40),
        terms=[flat],
        progress=no_progress,
    )
    assert found.loss <= min(loss for _, loss in found.trace)
    assert float(matcher_of(model, target).value(found.images[None], labels)) == pytest.approx(
        found.loss, rel=1e-4
    )


def test_the_best_of_several_seeds_wins() -> None:
    model, target, truth, labels = problem()
    starts = torch.stack([pictures(1, 2, 4), truth, pictures(1, 3, 4)])
    found = search(
        matcher_of(model, target),
        Pixels(starts, LOW, HIGH),
        labels.expand(3, -1),
        Budget(2, lr=1e-6),
        progress=no_progress,
    )
    assert int(found.by_seed.argmin()) == 1
    assert torch.allclose(found.images, truth, atol=1e-4)


def test_schedules() -> None:
    cosine_, step = Budget(100, lr=1.0, warmup=10), Budget(100, lr=1.0, schedule="step")
    assert cosine_.rate(0) == pytest.approx(0.1)
    assert cosine_.rate(9) == pytest.approx(1.0)
    assert cosine_.rate(55) == pytest.approx(0.5)
    assert [round(step.rate(s), 6) for s in (0, 38, 63, 88)] == [1.0, 0.1, 0.01, 0.001]
    phases = Budget(10, phases=((0.0, 1.0), (0.5, 0.5)))
    assert [phases.matching_weight(d) for d in (0.0, 0.4, 0.5, 0.9)] == [1.0, 1.0, 0.5, 0.5]


def test_patience_ends_a_search_that_stands_still() -> None:
    model, target, _, labels = problem()
    found = search(
        matcher_of(model, target),
        Pixels(pictures(1, 2, 4)[None], LOW, HIGH),
        labels,
        Budget(1000, lr=1e-12, patience=40),
        progress=no_progress,
    )
    assert found.steps < 200
    assert any("stopped early" in note for note in found.notes)


class InterruptedSearchError(Exception):
    pass


@pytest.mark.parametrize("langevin", [0.0, 0.1])
def test_a_search_goes_on_from_its_notebook_with_the_same_numbers(
    tmp_path: Path, langevin: float
) -> None:
    model, target, _, labels = problem()
    budget = Budget(40, langevin=langevin, save_seconds=0.0)
    start = pictures(1, 2, 4)[None]
    notebook = Notebook(tmp_path / "page.safetensors")

    def run(stop_at: int | None, page: Notebook | None) -> torch.Tensor:
        def progress(done: int, total: int, loss: float | None = None) -> None:
            if stop_at is not None and done >= stop_at:
                raise InterruptedSearchError

        found = search(
            matcher_of(model, target),
            Pixels(start, LOW, HIGH),
            labels,
            budget,
            generator=torch.Generator().manual_seed(0),
            progress=progress,
            notebook=page,
        )
        return found.images

    whole = run(None, None)
    with pytest.raises(InterruptedSearchError):
        run(17, notebook)
    assert notebook.path.is_file()
    assert torch.equal(run(None, notebook), whole)
    assert not notebook.path.exists()


def resumed(tmp_path: Path, run: Callable[..., torch.Tensor], stop_at: int) -> None:
    """A run that is cut at a step and gone on with ends where a whole one does."""

    def stops(done: int, total: int, loss: float | None = None) -> None:
        if done >= stop_at:
            raise InterruptedSearchError

    notebook = Notebook(tmp_path / "page.safetensors")
    whole = run(None, no_progress)
    with pytest.raises(InterruptedSearchError):
        run(notebook, stops)
    assert notebook.path.is_file()
    assert torch.equal(run(notebook, no_progress), whole)


@pytest.mark.parametrize("stop_at", [21, 27])
def test_phases_and_the_consensus_of_seeds_survive_a_resume(tmp_path: Path, stop_at: int) -> None:
    model, target, _, labels = problem()
    starts = torch.stack([pictures(1, seed, 4) for seed in (12, 13)])

    def run(page: Notebook | None, progress: Progress) -> torch.Tensor:
        budget = Budget(40, phases=((0.0, 1.0), (0.5, 0.5)), save_seconds=0.0)
        group = Term("group", 0.1, GroupConsistency(registered=True, renewals=3))
        return search(
            matcher_of(model, target),
            Pixels(starts, LOW, HIGH),
            labels.expand(2, -1),
            budget,
            terms=[group],
            progress=progress,
            notebook=page,
        ).images

    resumed(tmp_path, run, stop_at)


def test_the_surrogate_point_survives_a_resume(tmp_path: Path) -> None:
    protocol = Protocol(upload="delta", lr=0.5, mean=(0, 0, 0), std=(1, 1, 1))
    labels = torch.tensor([0, 1])
    update = local_update(tiny(), [(pictures(2, 0, 4), labels)] * 8, protocol)
    target = Target({n: -t for n, t in update.tensors.items()})

    def run(page: Notebook | None, progress: Progress) -> torch.Tensor:
        matcher = PathMatcher(tiny(), target, Cosine(), delta=update.tensors)
        space = Pixels(pictures(2, 5, 4)[None], LOW, HIGH)
        budget = Budget(40, save_seconds=0.0)
        return search(matcher, space, labels[None], budget, progress=progress, notebook=page).images

    resumed(tmp_path, run, 23)


def test_a_page_of_another_search_is_not_gone_on_with(tmp_path: Path) -> None:
    model, target, _, labels = problem()
    notebook = Notebook(tmp_path / "page.safetensors")

    def run(fingerprint: str, progress: Progress) -> list[str]:
        return search(
            matcher_of(model, target),
            Pixels(pictures(1, 2, 4)[None], LOW, HIGH),
            labels,
            Budget(20, save_seconds=0.0),
            progress=progress,
            notebook=notebook,
            fingerprint=fingerprint,
        ).notes

    def stops(done: int, total: int, loss: float | None = None) -> None:
        if done >= 10:
            raise InterruptedSearchError

    with pytest.raises(InterruptedSearchError):
        run("one", stops)
    assert run("another", no_progress) == []
    with pytest.raises(InterruptedSearchError):
        run("one", stops)
    assert run("one", no_progress) == ["resumed at step 9"]


def test_seeds_of_a_network_with_kinks_are_not_batched() -> None:
    spec = ModelSpec(name="convnet", options={"channels": [8, 8]})
    model, labels = model_of(spec), torch.tensor([1])
    target = target_of(model, pictures(1, 1), labels)
    assert not GradientMatcher(model, target, Cosine()).batchable
    smooth = model_of(VIT)
    assert GradientMatcher(smooth, target_of(smooth, pictures(1, 1), labels), Cosine()).batchable


def test_the_unrolled_client_trains_also_what_is_not_matched() -> None:
    protocol = Protocol(upload="delta", lr=0.5, mean=(0, 0, 0), std=(1, 1, 1))
    images, labels, rows = pictures(2, 0, 4), torch.tensor([0, 1]), [[0, 1]] * 3
    update = local_update(tiny(), [(images, labels)] * 3, protocol)
    part = Target({name: update.tensors[name] for name in ("1.weight", "1.bias")})
    ways: tuple[Way, ...] = ("first_order", "double")
    for way in ways:
        matcher = UnrolledMatcher(
            tiny(), part, SquaredL2(), way=way, protocol=protocol, batches=rows
        )
        assert float(matcher.value(images[None], labels[None])) < 1e-8


def test_a_damaged_notebook_is_started_afresh(tmp_path: Path) -> None:
    path = tmp_path / "page.safetensors"
    path.write_bytes(b"not a page")
    assert Notebook(path).load() is None
    assert not path.exists()


def test_a_loss_that_is_never_finite_is_an_error() -> None:
    model, target, _, labels = problem()
    with torch.no_grad():
        model[1].weight.fill_(float("nan"))
    with pytest.raises(AttackError, match="never finite"):
        search(
            matcher_of(model, target),
            Pixels(pictures(1, 2, 4)[None], LOW, HIGH),
            labels,
            Budget(3),
            progress=no_progress,
        )

"""Admission: the form of an upload, and how far its numbers may go."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from flwr.app import Message, MessageType
from torch import Tensor

from fedsim.audit.stages import federate
from fedsim.campaign.plan import prepare
from fedsim.clients.shards import images_of, shards_of
from fedsim.core import wire
from fedsim.core.defense import Defense
from fedsim.core.errors import ReplyError
from fedsim.core.learning import Update
from fedsim.core.observation import read_observation
from fedsim.core.run import Run, list_observations
from fedsim.core.spec import Spec, Upload
from fedsim.federation.admission import REACH, UNKNOWN, Admission, fits, form_of
from tests.canned import CLASSES, canned_plan, honest_upload
from tests.conftest import small_spec

RESNET = "model={name: resnet10t}"


def admission(root: Path, *overrides: str, classes: int | None = CLASSES) -> Admission:
    plan = canned_plan(*overrides)
    run = Run.create(root / "run", plan.spec, deployed=True, classes=classes)
    return Admission(plan.spec, run, plan.public, plan.initial)


def sent(content: wire.RecordDict) -> Message:
    return Message(content, dst_node_id=1, message_type=MessageType.TRAIN)


def update_of(*overrides: str) -> Update:
    plan = canned_plan(*overrides)
    kind = plan.public.protocol.upload
    return wire.uploaded(honest_upload(plan, 0), kind, form_of(plan.public))


@dataclass(frozen=True)
class Halves(Defense):
    """Uploads every other parameter, in half the bytes."""

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        kept = list(update.tensors.items())[::2]
        return replace(update, tensors={name: tensor.half() for name, tensor in kept})


HONEST = {
    "plain": ("train.upload=gradient",),
    "delta": ("train={rounds: 1, upload: delta, local_steps: 2, lr: 0.05}",),
    "epochs": ("train={rounds: 1, upload: delta, local_epochs: 2, lr: 0.05, batch_size: 64}",),
    "frozen": ("defenses=[{name: frozen_pe}]",),
    "withheld": ("defenses=[{name: withheld, parts: [position, head]}]",),
    "mjp": ("defenses=[{name: mjp}]",),
    "quantized": ("defenses=[{name: quantization}]",),
    "sparse": ("defenses=[{name: top_k, sparsity: 0.9}]",),
    "dp": ("defenses=[{name: dp_sgd}]",),
    "very private": ("defenses=[{name: local_dp, epsilon: 0.01}]",),
    "loud": ("defenses=[{name: gaussian_noise, std: 1000}]",),
    "masked": ("defenses=[{name: secure_aggregation}]",),
    "shared statistics": (RESNET, "train.batch_size=2"),
    "local statistics": (RESNET, "train.batch_size=2", "train.batchnorm=local"),
    "large steps": ("train.lr=100",),
    "halves": ("train.upload_dtype=float16",),
    "other halves": ("train={rounds: 1, upload: delta, lr: 0.05, upload_dtype: bfloat16}",),
    "accumulated": ("train={rounds: 1, batch_size: 2, accumulate: 3, lr: 0.05}",),
    "by import path": ("defenses=[{name: 'tests.federation.test_admission:Halves'}]",),
}


@pytest.mark.parametrize("case", HONEST)
def test_what_honest_clients_send_is_let_in(case: str, tmp_path: Path) -> None:
    spec = small_spec("train.rounds=1", "attacks=[{name: prior_only}]", *HONEST[case])
    run = federate(spec, tmp_path / "run")
    assert run.events() == []
    assert list(run.rounds["clients"]) == [spec.cohort_size]


def test_the_form_of_an_upload_is_what_clients_upload(tmp_path: Path) -> None:
    for at, overrides in enumerate((HONEST["withheld"], HONEST["mjp"], HONEST["masked"])):
        spec = small_spec("train.rounds=1", *overrides)
        run = federate(spec, tmp_path / str(at))
        form = form_of(prepare(spec, willing=True).public)
        update = read_observation(list_observations(run.observations)[0]).update
        assert form.tensors == {n: wire.Blank.of(t) for n, t in update.tensors.items()}
        assert not form.partial


def test_a_mask_leaves_no_gaps_for_a_defense_by_import_path() -> None:
    names = "{name: 'tests.federation.test_admission:Halves'}"
    assert form_of(canned_plan(f"defenses=[{names}]").public).partial
    masked = form_of(canned_plan(f"defenses=[{names}, {{name: secure_aggregation}}]").public)
    assert not masked.partial
    assert "int64" in next(iter(masked.tensors.values())).dtypes


def filled(value: float) -> Callable[[Update], Update]:
    return lambda update: replace(
        update, tensors={n: torch.full_like(t, value) for n, t in update.tensors.items()}
    )


def spoiled(update: Update, value: float) -> Update:
    """One number of one tensor is another."""
    name = list(update.tensors)[3]
    tensor = update.tensors[name].clone()
    tensor.view(-1)[-1] = value
    return replace(update, tensors=update.tensors | {name: tensor})


@pytest.mark.parametrize("upload", list(Upload))
@pytest.mark.parametrize("value", [3e38, -3e38, 1e20, math.nan, math.inf, -math.inf])
def test_numbers_that_would_spoil_the_model_are_found(
    value: float, upload: Upload, tmp_path: Path
) -> None:
    door = admission(tmp_path, f"train.upload={upload}")
    honest = update_of(f"train.upload={upload}")
    assert door.fault_of(honest) is None
    reason = "norm is" if math.isfinite(value) else "not finite"
    for update in (filled(value)(honest), spoiled(honest, value)):
        assert reason in str(door.fault_of(update))
        admitted = door.train(sent(wire.upload(update)))
        assert admitted.fault is not None


def test_the_norm_is_that_of_all_tensors_together(tmp_path: Path) -> None:
    honest = update_of()
    norm = math.sqrt(sum(float(t.double().square().sum()) for t in honest.tensors.values()))
    just, below = f"train.max_norm={norm * 1.0001}", f"train.max_norm={norm * 0.9999}"
    assert admission(tmp_path / "a", just).fault_of(honest) is None
    assert "and at most" in str(admission(tmp_path / "b", below).fault_of(honest))


def test_without_a_bound_the_weights_move_by_a_million_norms_at_most(tmp_path: Path) -> None:
    plan = canned_plan("train.lr=0.05")
    weights = [t.double() for t in plan.initial.values() if t.is_floating_point()]
    norm = math.sqrt(sum(float(t.square().sum()) for t in weights))
    assert norm > 1
    door = admission(tmp_path / "a", "train.lr=0.05")
    assert door.limit == pytest.approx(REACH * norm / 0.05)
    delta = admission(tmp_path / "b", "train.upload=delta")
    assert delta.limit == pytest.approx(REACH * norm)


@pytest.mark.parametrize("examples", [0, -1, 2, 10**15])
def test_examples_that_no_client_can_have_used_are_refused(examples: int, tmp_path: Path) -> None:
    reply = wire.upload(replace(update_of(), num_examples=examples))
    with pytest.raises(ReplyError, match=f"claims {examples} examples, and a client has 1 to 1"):
        admission(tmp_path).train(sent(reply))


@pytest.mark.parametrize("loss", [math.nan, math.inf, -0.5, 1e7, 1e300])
def test_a_loss_that_none_can_be_is_refused(loss: float, tmp_path: Path) -> None:
    reply = wire.upload(replace(update_of(), loss=loss))
    with pytest.raises(ReplyError, match="loss is"):
        admission(tmp_path).train(sent(reply))


def bounds(spec: Spec, root: Path, classes: int | None = None) -> int:
    run = Run.create(root, spec, deployed=classes is not None, classes=classes)
    plan = canned_plan()
    return Admission(spec, run, plan.public, plan.initial).examples


def test_the_spec_says_how_many_examples_there_can_be(tmp_path: Path) -> None:
    steps = small_spec("train={upload: delta, local_steps: 3, batch_size: 4}")
    assert bounds(steps, tmp_path / "steps") == 12
    epochs = small_spec("train={upload: delta, local_epochs: 2}", "data.partition.kind=dirichlet")
    largest = max(len(shard) for shard in shards_of(epochs.data, epochs.seed))
    assert bounds(epochs, tmp_path / "epochs") == 2 * largest
    assert bounds(epochs, tmp_path / "far", CLASSES) == 2 * UNKNOWN, "it has no shards to count"
    said = small_spec("train={upload: delta, local_epochs: 2, max_examples: 900}")
    assert bounds(said, tmp_path / "said", CLASSES) == 900


def test_the_share_of_the_test_set_bounds_an_evaluation(tmp_path: Path) -> None:
    spec = small_spec("train.evaluate=true")
    run, plan = Run.create(tmp_path / "run", spec), canned_plan()
    door = Admission(spec, run, plan.public, plan.initial)
    share = -(-len(images_of(spec.data, "test")) // 2)
    good = wire.Evaluation(share, 1.0, 0.5)
    assert door.evaluation(sent(wire.evaluated(good)), 2) == good
    for bad, reason in {
        good._replace(examples=share + 1): f"its share has {share}",
        good._replace(examples=-1): "claims -1 examples",
        good._replace(loss=math.nan): "loss is nan",
        good._replace(loss=-1.0): "loss is -1",
        good._replace(accuracy=1.5): "accuracy is 1.5",
        good._replace(accuracy=math.nan): "accuracy is nan",
    }.items():
        with pytest.raises(ReplyError, match=reason):
            door.evaluation(sent(wire.evaluated(bad)), 2)


def test_a_server_without_the_data_is_told_the_size_of_the_test_set(tmp_path: Path) -> None:
    spec, plan = small_spec("train.evaluate=true"), canned_plan()
    run = Run.create(tmp_path / "run", spec, deployed=True, classes=CLASSES)
    door = Admission(spec, run, plan.public, plan.initial, tested=101)
    fair = wire.Evaluation(26, 1.0, 0.5)
    assert door.evaluation(sent(wire.evaluated(fair)), 4) == fair
    with pytest.raises(ReplyError, match="claims 27 examples, and its share has 26"):
        door.evaluation(sent(wire.evaluated(fair._replace(examples=27))), 4)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("bn1.running_mean", math.nan, "not finite"),
        ("bn1.running_mean", -3e38, "norm of its BatchNorm statistics"),
        ("bn1.running_var", -1.0, "'bn1.running_var' is below zero"),
        ("bn1.num_batches_tracked", -1, "below zero"),
        ("bn1.num_batches_tracked", 2**62, "num_batches_tracked' is 4.6"),
    ],
)
def test_statistics_that_would_spoil_the_model_are_found(
    name: str, value: float, reason: str, tmp_path: Path
) -> None:
    door, honest = admission(tmp_path, RESNET), update_of(RESNET)
    assert door.fault_of(honest) is None
    buffers = honest.buffers | {name: torch.full_like(honest.buffers[name], value)}
    assert reason in str(door.fault_of(replace(honest, buffers=buffers)))


def test_a_reply_without_content_is_refused(tmp_path: Path) -> None:
    empty = sent(wire.RecordDict())
    empty.__dict__["_content"] = None
    with pytest.raises(ReplyError, match="empty"):
        admission(tmp_path).train(empty)


@pytest.mark.parametrize(
    ("state", "is_one"),
    [
        ({"w": torch.ones(2)}, True),
        ({"w": torch.ones(2, 2)}, False),
        ({"w": torch.tensor([1.0, math.inf])}, False),
        ({"w": torch.tensor([math.nan, 1.0])}, False),
        ({"v": torch.ones(2)}, False),
    ],
)
def test_an_aggregate_is_a_model_or_left_out(state: dict[str, Tensor], is_one: bool) -> None:
    assert fits(state, {"w": torch.zeros(2)}) is is_one

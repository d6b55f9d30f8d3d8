"""One bad client: whatever it sends, the round ends, the others count, the model stays a model."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.app.error import Error
from flwr.serverapp.strategy import FedAvg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsim.campaign.plan import Plan
from fedsim.core import wire
from fedsim.core.errors import RunError
from fedsim.core.learning import Update
from fedsim.core.observation import is_finite, read_observation
from fedsim.core.run import Run, address_of, list_observations
from fedsim.defenses import create_defense
from fedsim.federation.admission import Admission, form_of
from fedsim.federation.aggregation import create_strategy
from fedsim.federation.checkpoint import read_checkpoint
from fedsim.federation.pace import FLOOR, Pace
from fedsim.federation.strategy import AdversarialStrategy
from tests.canned import SILENT, Answer, CannedGrid, canned_plan, federated, honest_upload

TRAIN, EVALUATE = MessageType.TRAIN, MessageType.EVALUATE
BAD = 1  # the client that misbehaves
Lie = Callable[[RecordDict], Answer]
FORM = form_of(canned_plan().public)
HEAD = "head.weight"


def told(run: Run) -> list[tuple[str, int | None, str]]:
    return [(e["kind"], e.get("client"), e["message"]) for e in run.events()]


def model_of(run: Run) -> dict[str, torch.Tensor]:
    return read_checkpoint(run).arrays


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def without_it(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The model of the same federation where the bad client says nothing."""
    plan = canned_plan()
    grid = CannedGrid(4, plan, delays={(BAD, TRAIN): SILENT})
    run = federated(plan, grid, tmp_path_factory.mktemp("control") / "run")
    assert [(kind, client) for kind, client, _ in told(run)] == [("client_silent", BAD)]
    return model_of(run)


def update(alter: Callable[[Update], Update]) -> Lie:
    """A lie that is an upload of the right form, or was one."""

    def lie(content: RecordDict) -> Answer:
        honest = wire.uploaded(content, canned_plan().public.protocol.upload, FORM)
        return wire.upload(alter(honest))

    return lie


def tensors(alter: Callable[[torch.Tensor], torch.Tensor], name: str | None = None) -> Lie:
    """Another tensor in the place of one, or of each."""
    return update(
        lambda honest: replace(
            honest,
            tensors={
                key: alter(tensor) if name in (None, key) else tensor
                for key, tensor in honest.tensors.items()
            },
        )
    )


def parameters(alter: Callable[[dict[str, torch.Tensor]], object]) -> Lie:
    """More tensors, or fewer."""

    def altered(honest: Update) -> Update:
        tensors = dict(honest.tensors)
        alter(tensors)
        return replace(honest, tensors=tensors)

    return update(altered)


def _with_first(tensor: torch.Tensor, value: float) -> torch.Tensor:
    altered = tensor.clone()
    altered.view(-1)[0] = value
    return altered


def record(key: str, other: ArrayRecord | MetricRecord | ConfigRecord | None) -> Lie:
    def lie(content: RecordDict) -> Answer:
        content.pop(key, None)
        if other is not None:
            content[key] = other
        return content

    return lie


def metric(**said: Any) -> Lie:
    honest = {"num_examples": 1, "train_loss": 1.0}
    names = {"num_examples": wire.EXAMPLES}
    changed = {names.get(key, key): value for key, value in (honest | said).items()}
    kept = {key: value for key, value in changed.items() if value is not None}
    return record("metrics", MetricRecord(kept))


def head(**declared: Any) -> Lie:
    """Another array in the place of the head's, down to its bytes."""

    def lie(content: RecordDict) -> Answer:
        for name, value in declared.items():
            setattr(content.array_records["arrays"][HEAD], name, value)
        return content

    return lie


LIES: dict[str, tuple[Lie, str]] = {
    "another shape": (tensors(lambda t: t[:-1], HEAD), "shape"),
    "all shapes flat": (tensors(lambda t: t.reshape(-1)), "shape"),
    "a shape that broadcasts": (tensors(lambda t: t.expand(2, *t.shape)), "shape"),
    "3e38": (tensors(lambda t: torch.full_like(t, 3e38)), "norm is"),
    "one number of 3e38": (tensors(lambda t: _with_first(t, 3e38), HEAD), "norm is"),
    "nan": (tensors(lambda t: t * float("nan"), HEAD), "not finite"),
    "inf": (tensors(lambda t: t / 0, HEAD), "not finite"),
    "float64": (tensors(lambda t: t.double(), HEAD), "type float64"),
    "whole numbers": (tensors(lambda t: t.long()), "type int64"),
    "10^15 examples": (metric(num_examples=10**15), "claims 1000000000000000 examples"),
    "-1 examples": (metric(num_examples=-1), "claims -1 examples"),
    "no examples": (metric(num_examples=0), "claims 0 examples"),
    "half an example": (metric(num_examples=0.5), "no whole number"),
    "a list of examples": (metric(num_examples=[1, 2]), "no number"),
    "examples nobody counts": (metric(num_examples=None), "lacks the metric 'num-examples'"),
    "a metric more": (metric(accuracy=1.0), "metric 'accuracy' that was not asked for"),
    "a loss of nan": (metric(train_loss=float("nan")), "loss is nan"),
    "no metrics": (record("metrics", None), "lacks the record 'metrics'"),
    "no arrays": (record("arrays", None), "lacks the record 'arrays'"),
    "empty arrays": (record("arrays", ArrayRecord()), "lacks the array"),
    "texts for arrays": (record("arrays", ConfigRecord({"head": "rm -rf"})), "holds no arrays"),
    "a record more": (record("extra", ConfigRecord({"x": "y"})), "record 'extra' that was not"),
    "statistics nobody shares": (record("buffers", ArrayRecord()), "record 'buffers' that was not"),
    "a parameter less": (parameters(lambda t: t.pop(HEAD)), f"lacks the array '{HEAD}'"),
    "a parameter more": (parameters(lambda t: t.update(x=t[HEAD])), "array 'x' that was not asked"),
    "nothing at all": (lambda content: RecordDict(), "lacks the record"),
    "garbage": (head(data=b"\x00\xffgarbage" * 9), "bytes"),
    "a pickle": (head(data=pickle.dumps(np.zeros((3, 12), np.float32))), "no array|bytes"),
    "a shape it does not have": (head(shape=(10**9, 10**9)), "shape"),
    "a type it does not have": (head(dtype="object"), "type object"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_reply_that_is_no_update_is_left_out_and_the_round_goes_on(
    case: str, without_it: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    lie, reason = LIES[case]
    plan = canned_plan()
    attacked: list[int] = []
    run = federated(
        plan,
        CannedGrid(4, plan, {(BAD, TRAIN): lie}),
        tmp_path / "run",
        on_observation=lambda round_, client: attacked.append(client),
    )
    ((kind, client, words),) = told(run)
    assert (kind, client) == ("update_rejected", BAD)
    assert re.search(reason, words), words
    assert words.isprintable()
    assert len(words) < 300
    assert list(run.rounds["clients"]) == [3]
    assert list(run.rounds["failed"]) == [1]
    assert same(model_of(run), without_it), "it touched the model"
    assert sorted(attacked) == [0, 2, 3]
    for path in list_observations(run.observations):
        observation = read_observation(path)
        assert observation.update.tensors.keys() == FORM.tensors.keys()
        assert is_finite(path) is (address_of(path)[1] != BAD)


@pytest.mark.parametrize(
    "words", ["the vault cannot be written: No space left on device.", "x" * 10**6, "\x1b[2J\n\x07"]
)
def test_an_error_is_repeated_in_a_few_printable_words_whatever_it_speaks_of(
    words: str, without_it: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    plan = canned_plan()
    for at, answer in enumerate((Error(2, words), wire.fault(words))):
        grid = CannedGrid(4, plan, {(BAD, TRAIN): lambda content, answer=answer: answer})
        run = federated(plan, grid, tmp_path / str(at))
        ((kind, client, said),) = told(run)
        assert (kind, client) == ("client_failed", BAD)
        assert len(said) < 600
        assert said.isprintable()
        assert same(model_of(run), without_it)


def test_the_testbeds_own_vault_still_ends_a_simulation(tmp_path: Path) -> None:
    plan = canned_plan()
    grid = CannedGrid(4, plan, {(BAD, TRAIN): lambda content: wire.fault("the disk is full")})
    with pytest.raises(RunError, match="the disk is full"):
        federated(plan, grid, tmp_path / "run", deployed=False)


def test_where_every_reply_is_bad_the_model_stays_as_it_was(tmp_path: Path) -> None:
    plan = canned_plan()
    none = metric(num_examples=0)  # the weights of an average would add up to nothing
    run = federated(plan, CannedGrid(4, plan, {(c, TRAIN): none for c in range(4)}), tmp_path / "r")
    assert [kind for kind, _, _ in told(run)] == ["update_rejected"] * 4
    assert list(run.rounds["clients"]) == [0]
    assert same(model_of(run), plan.initial)


@pytest.mark.parametrize("strategy", ["FedAvg", "FedAvgM", "FedAdam"])
def test_a_client_that_goes_to_the_bound_in_every_round_leaves_a_finite_model(
    strategy: str, tmp_path: Path
) -> None:
    plan = canned_plan(f"train={{rounds: 12, lr: 0.05, evaluate: false, strategy: {strategy}}}")
    run = Run.create(tmp_path / "bound", plan.spec, deployed=True, classes=3)
    limit = Admission(plan.spec, run, plan.public, plan.initial).limit
    numbers = sum(tensor.numel() for tensor in plan.initial.values())
    most = tensors(lambda t: torch.full_like(t, 0.999 * limit / numbers**0.5))
    run = federated(plan, CannedGrid(4, plan, {(BAD, TRAIN): most}), tmp_path / "run")
    assert run.events() == []
    if strategy != "FedAdam":  # which takes steps of its own length
        assert max(float(tensor.abs().max()) for tensor in model_of(run).values()) > 1e3
    assert all(torch.isfinite(tensor).all() for tensor in model_of(run).values())


class Meddled(AdversarialStrategy):
    """Sees each reply once more, with other numbers, and from a node that nobody knows."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        return super().aggregate_train(server_round, self.more(replies))

    def more(self, replies: Any) -> Iterator[Message]:
        for reply in replies:
            yield reply
            for source in (reply.metadata.src_node_id, 77):
                other = honest_upload(canned_plan(), 9)
                again = Message(other, dst_node_id=1, message_type=TRAIN)
                again.metadata.__dict__["_src_node_id"] = source
                yield again


def test_replies_of_strangers_and_second_replies_are_left_out(
    without_it: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    plan = canned_plan()
    grid = CannedGrid(4, plan, {(BAD, TRAIN): lambda content: Error(2, "broken")})
    run = Run.create(tmp_path / "run", plan.spec, deployed=True, classes=3)
    pace = Pace(10, FLOOR, grid.clock)
    strategy = Meddled(create_strategy(plan.spec), plan.spec, run, plan.public, pace=pace)
    strategy.run_rounds(grid, plan.initial)
    assert same(model_of(run), without_it)
    rejected = [(client, words) for kind, client, words in told(run) if kind == "update_rejected"]
    assert (None, "a node that is no client sent a reply; it is left out") in rejected
    assert {client for client, words in rejected if "replied again" in words} == {0, 1, 2, 3}


EVALUATED = "train={rounds: 1, lr: 0.05, evaluate: true}"
ASSESSMENTS: dict[str, Lie] = {
    "10^15 examples": lambda content: wire.evaluated(wire.Evaluation(10**15, 1.0, 0.5)),
    "-4 examples": lambda content: wire.evaluated(wire.Evaluation(-4, 1.0, 0.5)),
    "nan": lambda content: wire.evaluated(wire.Evaluation(4, float("nan"), 0.5)),
    "better than perfect": lambda content: wire.evaluated(wire.Evaluation(4, 1.0, 40.0)),
    "nothing": lambda content: RecordDict(),
    "texts": record("metrics", ConfigRecord({"x": "y"})),
    "an update": lambda content: honest_upload(canned_plan(EVALUATED), 0),
    "a list": record("metrics", MetricRecord({wire.EXAMPLES: [4], "test_loss": 1.0})),
}


@pytest.mark.parametrize("case", ASSESSMENTS)
def test_an_evaluation_that_is_none_is_left_out(case: str, tmp_path: Path) -> None:
    plan = canned_plan(EVALUATED)
    grid = CannedGrid(4, plan, {(BAD, EVALUATE): ASSESSMENTS[case]})
    run = federated(plan, grid, tmp_path / "run")
    assert [(kind, client) for kind, client, _ in told(run)] == [("evaluation_rejected", BAD)]
    assert list(run.rounds["test_loss"]) == [1.5]
    assert list(run.rounds["test_accuracy"]) == [0.25]


@pytest.mark.parametrize("claimed", [250_000, 17, 5])
def test_one_client_does_not_set_the_accuracy_of_a_test_set_whose_size_is_known(
    claimed: int, tmp_path: Path
) -> None:
    plan = canned_plan(EVALUATED)
    lie = wire.evaluated(wire.Evaluation(claimed, 0.0, 1.0))
    grid = CannedGrid(4, plan, {(BAD, EVALUATE): lambda content: lie})
    run = federated(plan, grid, tmp_path / "run", tested=16)
    assert [(kind, client) for kind, client, _ in told(run)] == [("evaluation_rejected", BAD)]
    assert list(run.rounds["test_accuracy"]) == [0.25]


def test_where_the_size_of_the_test_set_is_not_known_all_count_alike(tmp_path: Path) -> None:
    plan = canned_plan(EVALUATED)
    lie = wire.evaluated(wire.Evaluation(250_000, 0.0, 1.0))
    grid = CannedGrid(4, plan, {(BAD, EVALUATE): lambda content: lie})
    run = federated(plan, grid, tmp_path / "run")
    assert list(run.rounds["test_accuracy"]) == pytest.approx([(3 * 0.25 + 1.0) / 4])
    assert list(run.rounds["test_loss"]) == pytest.approx([3 * 1.5 / 4])


def test_who_did_not_train_has_no_share_of_the_test_set(tmp_path: Path) -> None:
    plan = canned_plan(EVALUATED)
    grid = CannedGrid(4, plan, delays={(BAD, TRAIN): SILENT})
    federated(plan, grid, tmp_path / "run")
    assert sorted(client for client, kind, _ in grid.asked if kind == EVALUATE) == [0, 2, 3]


# -- aggregates -------------------------------------------------------------------------------


@dataclass
class Failing(FedAvg):
    """A strategy that fails, or answers with what is no model."""

    answer: Callable[[ArrayRecord], ArrayRecord]

    def __post_init__(self) -> None:
        super().__init__(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None
        return self.answer(arrays), metrics


def _each(arrays: ArrayRecord, alter: Callable[[Any], Any]) -> ArrayRecord:
    return ArrayRecord({name: Array(alter(array.numpy())) for name, array in arrays.items()})


def raises(arrays: ArrayRecord) -> ArrayRecord:
    raise ZeroDivisionError("weights that add up to nothing")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda arrays: _each(arrays, lambda a: a * np.nan), "finite"),
        (lambda arrays: _each(arrays, lambda a: a[None]), "shapes"),
        (lambda arrays: ArrayRecord({HEAD: arrays[HEAD]}), "shapes"),
        (raises, "FedAvg could not aggregate: ZeroDivisionError"),
    ],
)
def test_an_aggregate_that_is_no_model_is_left_out(
    answer: Callable[[ArrayRecord], ArrayRecord], words: str, tmp_path: Path
) -> None:
    plan = canned_plan()
    grid = CannedGrid(4, plan, {(BAD, TRAIN): metric(num_examples=0)})
    run = Run.create(tmp_path / "run", plan.spec, deployed=True, classes=3)
    pace = Pace(10, FLOOR, grid.clock)
    strategy = AdversarialStrategy(Failing(answer), plan.spec, run, plan.public, pace=pace)
    strategy.run_rounds(grid, plan.initial)
    kinds = {kind: said for kind, _, said in told(run)}
    assert kinds.keys() == {"update_rejected", "aggregate_rejected"}
    assert words in kinds["aggregate_rejected"]
    assert list(run.rounds["clients"]) == [0]
    assert same(model_of(run), plan.initial)


def test_a_strategy_that_fails_on_honest_replies_ends_the_run_in_one_sentence(
    tmp_path: Path,
) -> None:
    plan = canned_plan()
    grid = CannedGrid(4, plan)
    run = Run.create(tmp_path / "run", plan.spec, deployed=True, classes=3)
    pace = Pace(10, FLOOR, grid.clock)
    strategy = AdversarialStrategy(Failing(raises), plan.spec, run, plan.public, pace=pace)
    with pytest.raises(RunError, match="FedAvg could not aggregate: ZeroDivisionError"):
        strategy.run_rounds(grid, plan.initial)


def unreadable(arrays: ArrayRecord) -> ArrayRecord:
    raise OSError(5, "Input/output error")  # updates that did not fit in memory are read back


def test_a_disk_that_fails_is_no_clients_fault(tmp_path: Path) -> None:
    plan = canned_plan()
    grid = CannedGrid(4, plan, {(BAD, TRAIN): metric(num_examples=0)})
    run = Run.create(tmp_path / "run", plan.spec, deployed=True, classes=3)
    pace = Pace(10, FLOOR, grid.clock)
    strategy = AdversarialStrategy(Failing(unreadable), plan.spec, run, plan.public, pace=pace)
    with pytest.raises(OSError, match="Input/output error"):
        strategy.run_rounds(grid, plan.initial)


# -- masks --------------------------------------------------------------------------------------

MASKED = "defenses=[{name: secure_aggregation}]"


def masked_upload(plan: Plan, client: int) -> RecordDict:
    """What an honest client uploads under secure aggregation, over a cohort of four."""
    plain = canned_plan()
    kind = plain.public.protocol.upload
    clear = wire.uploaded(honest_upload(plain, client), kind, form_of(plain.public))
    mask = create_defense("secure_aggregation").at_round(1, client, range(4))
    return wire.upload(mask.protect_update(clear, torch.Generator()))


def masked_grid(plan: Plan, lie: Lie) -> CannedGrid:
    honest = {
        (client, TRAIN): lambda content, client=client: masked_upload(plan, client)
        for client in range(4)
    }
    return CannedGrid(4, plan, honest | {(BAD, TRAIN): lambda _: lie(masked_upload(plan, BAD))})


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (record("arrays", ArrayRecord({HEAD: torch.ones(3, 12, dtype=torch.int64)})), "lacks"),
        (lambda content: honest_upload(canned_plan(), BAD), "type float32, not int64"),
        (metric(num_examples=-1), "claims -1"),
    ],
)
def test_a_bad_mask_that_shows_is_left_out_and_the_sum_of_the_others_remains(
    case: Lie, reason: str, without_it: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    plan = canned_plan(MASKED)
    run = federated(plan, masked_grid(plan, case), tmp_path / "run")
    ((kind, client, words),) = told(run)
    assert (kind, client) == ("update_rejected", BAD)
    assert reason in words
    assert list(run.rounds["clients"]) == [3]
    for name, tensor in model_of(run).items():
        assert torch.allclose(tensor, without_it[name], atol=1e-6)


def test_a_bad_mask_that_does_not_show_costs_the_round_and_not_the_model(tmp_path: Path) -> None:
    def made_up(content: RecordDict) -> Answer:
        coin = torch.Generator().manual_seed(3)
        record = content.array_records["arrays"]
        for name, array in record.items():
            noise = torch.randint(-(2**62), 2**62, array.shape, generator=coin)
            record[name] = Array(noise.numpy())
        return content

    plan = canned_plan(MASKED)
    run = federated(plan, masked_grid(plan, made_up), tmp_path / "run")
    ((kind, client, words),) = told(run)
    assert (kind, client) == ("sum_rejected", None)
    assert "nobody can say whose" in words
    assert list(run.rounds["clients"]) == [0]
    assert same(model_of(run), plan.initial)


# -- silence ------------------------------------------------------------------------------------


def test_a_silent_client_costs_a_pace_and_then_a_grace_and_never_the_timeout(
    tmp_path: Path,
) -> None:
    plan = canned_plan("train={rounds: 4, lr: 0.05, evaluate: true}")
    grid = CannedGrid(4, plan, delays={(BAD, TRAIN): SILENT})
    run = federated(plan, grid, tmp_path / "run")
    assert list(run.rounds["clients"]) == [3, 3, 3, 3]
    assert [kind for kind, _, _ in told(run)] == ["client_silent"] * 4
    assert f"within {FLOOR:.0f} s" in told(run)[0][2]
    assert grid.clock.now < FLOOR + 3 * 15 + 20
    assert [client for client, kind, _ in grid.asked if kind == TRAIN].count(BAD) == 4


def test_a_client_that_comes_back_counts_again(tmp_path: Path) -> None:
    plan = canned_plan("train={rounds: 3, lr: 0.05, evaluate: false}")
    grid = CannedGrid(4, plan, delays={(BAD, TRAIN): SILENT})
    run = federated(plan, grid, tmp_path / "run", on_round=lambda row: grid.delays.clear())
    assert list(run.rounds["clients"]) == [3, 4, 4]


def test_a_client_that_fails_its_first_query_costs_nobody_the_run(tmp_path: Path) -> None:
    plan = canned_plan("train={rounds: 2, lr: 0.05, evaluate: false}")
    kind = MessageType.QUERY
    grid = CannedGrid(4, plan, {(BAD, kind): lambda content: Error(1, "no module named fedsim")})
    run = federated(plan, grid, tmp_path / "run")
    assert list(run.rounds["clients"]) == [3, 3]
    said = told(run)
    assert ("node_refused", None, "a client cannot start: no module named fedsim") in said
    silent = ("client_silent", BAD, f"client {BAD} is not there")
    assert said.count(silent) == 2


def test_a_strategy_that_wants_more_clients_than_there_are_ends_the_run(tmp_path: Path) -> None:
    options = "train={rounds: 1, strategy_options: {min_available_nodes: 4}}"
    plan = canned_plan(options)
    grid = CannedGrid(4, plan, {(BAD, MessageType.QUERY): lambda content: RecordDict()})
    with pytest.raises(RunError, match=r"has 3 clients and .* asks for at least 4"):
        federated(plan, grid, tmp_path / "run")


def test_a_cohort_that_is_not_there_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    plan = canned_plan("train={rounds: 1, clients_per_round: 1, evaluate: true}")
    (only,) = plan.spec.cohort(1)
    grid = CannedGrid(4, plan, {(only, MessageType.QUERY): lambda content: RecordDict()})
    run = federated(plan, grid, tmp_path / "run")
    assert list(run.rounds["clients"]) == [0]
    assert same(model_of(run), plan.initial)


# -- anything -----------------------------------------------------------------------------------

HONEST, HOSTILE = 2, 10
NUMBERS = [0, 1, -1, 2, 10**15, 2**63, -(10**400), 0.5, 3e38, 1e308, float("nan"), float("inf")]
SCALARS = st.one_of(st.sampled_from(NUMBERS), st.integers(), st.floats())
METRICS = st.one_of(SCALARS, st.lists(st.floats(), max_size=3), st.lists(st.integers(), max_size=3))
CONFIGS = st.one_of(
    SCALARS.filter(lambda number: abs(number) < 2**62), st.text(), st.binary(), st.booleans()
)
NAMES = st.one_of(st.sampled_from([*FORM.tensors, "backdoor"]), st.text(max_size=8))
RECORDS = st.sampled_from(["arrays", "metrics", "buffers", "fault", "config", "\x1b[31m"])
KEYS = st.one_of(
    st.sampled_from([wire.EXAMPLES, wire.TRAIN_LOSS, wire.TEST_LOSS, "reason"]), st.text(max_size=5)
)
TYPES = st.sampled_from(["float32", "float64", "int64", "uint8", "bool", "<U3", "complex64"])


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Numbers or texts of any shape, or bytes that say they are."""
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    made = Array(np.zeros(shape, draw(TYPES)))
    if draw(st.booleans()):
        made.data = draw(st.one_of(st.binary(max_size=200), st.just(made.data[:-1])))
    if draw(st.booleans()):
        made.shape = tuple(draw(st.lists(st.integers(-(2**63), 2**63), max_size=3)))
    if draw(st.booleans()):
        made.dtype = draw(st.one_of(TYPES, st.text(max_size=5)))
    if not draw(st.integers(0, 3)):
        made.stype = draw(st.text(max_size=5))
    return made


def dictionary(
    keys: st.SearchStrategy[str], values: st.SearchStrategy[Any], make: Callable[[], Any]
) -> st.SearchStrategy[Any]:
    def fill(content: dict[str, Any]) -> Any:
        record = make()
        for key, value in content.items():
            record[key] = value
        return record

    return st.dictionaries(keys, values, max_size=3).map(fill)


ANY_RECORD = st.one_of(
    dictionary(NAMES, arrays(), ArrayRecord),
    dictionary(KEYS, METRICS, MetricRecord),
    dictionary(KEYS, CONFIGS, ConfigRecord),
)
ANYTHING = dictionary(RECORDS, ANY_RECORD, RecordDict)


@st.composite
def nearly_honest(draw: st.DrawFn) -> RecordDict:
    """An honest upload of which some was altered."""
    content = honest_upload(canned_plan(), draw(st.integers(0, 9)))
    record, metrics = content.array_records["arrays"], content.metric_records["metrics"]
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(FORM.tensors)))
        what = draw(st.sampled_from(["number", "array", "bytes", "less", "metric", "record"]))
        if what == "number":
            altered = np.zeros(FORM.tensors[name].shape, np.float32)
            altered.flat[draw(st.integers(0, altered.size - 1))] = draw(
                st.one_of(st.sampled_from([3e38, np.nan, np.inf, 1e9, -1e30]), st.floats(width=32))
            )
            record[name] = Array(altered)
        elif what == "array":
            record[draw(NAMES)] = draw(arrays())
        elif what == "bytes" and name in record:
            data = bytearray(record[name].data)
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
            record[name].data = bytes(data)
        elif what == "less" and name in record:
            del record[name]
        elif what == "metric":
            metrics[draw(KEYS)] = draw(METRICS)
        else:
            content[draw(RECORDS)] = draw(ANY_RECORD)
    return content


ERRORS = st.builds(Error, st.integers(0, 8), st.one_of(st.none(), st.text(), st.just("the vault")))
REPLIES = st.one_of(ANYTHING, nearly_honest(), nearly_honest(), ERRORS)


def meet(strategy: str, examples: int, root: Path) -> int:
    """How many hostile replies a strategy met, and survived."""
    clients = f"data.clients={HONEST + HOSTILE}"
    plan = canned_plan(clients, EVALUATED, f"train.strategy={strategy}", *OPTIONS.get(strategy, []))
    met = 0

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(REPLIES, min_size=HOSTILE, max_size=HOSTILE), ANYTHING)
    def throw(lies: list[Answer], evaluation: RecordDict) -> None:
        nonlocal met
        met += len(lies)
        said = dict(enumerate(lies, start=HONEST))
        grid = CannedGrid(HONEST + HOSTILE, plan, usually=0.0)
        grid.answers = {(c, TRAIN): lambda _, lie=lie: lie for c, lie in said.items()}
        grid.answers[HONEST, EVALUATE] = lambda content: evaluation
        run = federated(plan, grid, root / str(met))
        survived(run, plan)

    throw()
    return met


def survived(run: Run, plan: Plan) -> None:
    (row,) = run.rounds.to_dict("records")
    assert row["clients"] >= HONEST
    blamed = {client for _, client, _ in told(run)}
    assert not blamed & set(range(HONEST))
    trained = {client for kind, client, _ in told(run) if not kind.startswith("evaluation")}
    assert row["clients"] + len(trained) == HONEST + HOSTILE, "each is let in, or told of"
    assert all(words.isprintable() and len(words) < 700 for _, _, words in told(run))
    for name, tensor in model_of(run).items():
        assert tensor.shape == plan.initial[name].shape
        assert tensor.dtype == plan.initial[name].dtype
        assert torch.isfinite(tensor).all()
    assert not same(model_of(run), plan.initial), "the honest ones were not heard"
    for path in list_observations(run.observations):
        assert read_observation(path).update.tensors.keys() == FORM.tensors.keys()


OPTIONS = {"QFedAvg": ["train.strategy_options={client_learning_rate: 0.05}"]}


def test_anything_can_be_sent_and_the_round_ends(tmp_path: Path) -> None:
    assert meet("FedAvg", 20, tmp_path) >= 200


@pytest.mark.slow
def test_five_thousand_hostile_replies_are_survived(tmp_path: Path) -> None:
    strategies = ("FedAvg", "FedAdam", "FedMedian", "QFedAvg")
    counts = {name: meet(name, 130, tmp_path / name) for name in strategies}
    print(counts)
    assert sum(counts.values()) >= 5000

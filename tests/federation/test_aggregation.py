"""Aggregation: Flower's strategies by name, and the sum that secure aggregation reveals."""

from __future__ import annotations

from typing import cast

import flwr.serverapp.strategy as flower
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedsim.core import wire
from fedsim.core.errors import RunError, SpecError
from fedsim.core.learning import Update
from fedsim.core.spec import Upload
from fedsim.defenses import create_defense
from fedsim.federation.aggregation import (
    CohortSum,
    Reply,
    _beyond,
    create_strategy,
    masking,
    refuse_counters,
    refuse_too_few,
)
from fedsim.federation.grids import Cohort
from tests.conftest import small_spec

TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # messages ask for them


def test_a_strategy_that_flower_lacks_is_named_with_the_nearest_one() -> None:
    with pytest.raises(SpecError, match=r"no strategy 'FedAvgg'.*FedAvg"):
        create_strategy(small_spec("train.strategy=FedAvgg"))
    with pytest.raises(SpecError, match="strategy_options do not fit FedAvg"):
        create_strategy(small_spec("train.strategy_options={wrong: 1}"))


def test_a_strategy_is_not_left_waiting_for_nodes_that_are_not_there() -> None:
    usual = create_strategy(small_spec())
    for nodes in (0, 1, 5):
        refuse_too_few(usual, nodes, 1)
    for least in ("min_train_nodes", "min_available_nodes"):
        wants = create_strategy(small_spec(f"train.strategy_options={{{least}: 3}}"))
        refuse_too_few(wants, 3, 1)
        with pytest.raises(RunError, match=r"round 2 has 1 clients .* asks for at least 3"):
            refuse_too_few(wants, 1, 2)


def test_a_strategy_that_computes_in_place_is_not_given_counters() -> None:
    fair = create_strategy(
        small_spec("train={strategy: QFedAvg, strategy_options: {client_learning_rate: 0.05}}")
    )
    model = {"w": torch.zeros(2), "bn.num_batches_tracked": torch.tensor(3)}
    refuse_counters(fair, {"w": model["w"]})
    refuse_counters(create_strategy(small_spec()), model)
    with pytest.raises(SpecError, match=r"cannot average counters.*'bn\.num_batches_tracked'"):
        refuse_counters(fair, model)


def test_secure_aggregation_is_the_last_defense() -> None:
    assert masking(small_spec()) is None
    last = "defenses=[{name: clipping}, {name: secure_aggregation}]"
    assert masking(small_spec(last)) is not None
    with pytest.raises(SpecError, match="list it as the last defense"):
        masking(small_spec("defenses=[{name: secure_aggregation}, {name: clipping}]"))


def test_the_sum_of_a_cohort_is_the_mean_of_its_updates_and_no_update() -> None:
    cohort, stayed = [0, 1, 2], [0, 2]
    defense = create_defense("secure_aggregation")
    clear = {client: torch.randn(4, 3) for client in cohort}
    hidden = CohortSum(defense)
    for client in stayed:
        masked = defense.at_round(1, client, cohort).protect_update(
            Update(Upload.GRADIENT, {"w": clear[client]}), torch.Generator()
        )
        assert not torch.allclose(masked.tensors["w"].double(), clear[client].double())
        message = Message(RecordDict(), dst_node_id=1, message_type=MessageType.TRAIN)
        hidden.add(Reply(client, message, masked))
    assert all(not reply.update.tensors for reply in hidden.replies.values())
    revealed = list(hidden.revealed(1, cohort))
    assert [reply.client for reply in revealed] == stayed
    for reply in revealed:
        mean = (clear[0] + clear[2]) / 2
        assert torch.allclose(reply.update.tensors["w"], mean, atol=1e-6)


def test_nobody_answered_and_nothing_is_revealed() -> None:
    assert list(CohortSum(create_defense("secure_aggregation")).revealed(1, [0, 1])) == []


@pytest.mark.parametrize(
    "options",
    [
        "{fraction_train: .nan}",
        "{fraction_train: 3}",
        "{min_train_nodes: abc}",
        "{min_train_nodes: 1.5}",
        "{arrayrecord_key: 3}",
        "{evaluate_metrics_aggr_fn: abc}",
    ],
)
def test_options_of_another_kind_than_a_strategys_own_are_refused(options: str) -> None:
    with pytest.raises(SpecError, match=r"train\.strategy_options\."):
        create_strategy(small_spec(f"train.strategy_options={options}"))


def test_options_as_a_strategy_takes_them_reach_it() -> None:
    spec = small_spec("train.strategy=FedAdam", "train.strategy_options={eta: 0.3, tau: 1}")
    strategy = create_strategy(spec)
    assert (strategy.eta, strategy.tau) == (0.3, 1)


def test_an_option_that_a_strategy_has_no_default_for_may_be_given() -> None:
    spec = small_spec(
        "train.strategy=QFedAvg", "train.strategy_options={client_learning_rate: 0.1}"
    )
    assert create_strategy(spec).client_learning_rate == 0.1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("DifferentialPrivacyClientSideFixedClipping", "by a mod of Flower's"),
        ("DifferentialPrivacyClientSideAdaptiveClipping", "by a mod of Flower's"),
        ("DifferentialPrivacyServerSideFixedClipping", "hides nothing from that server"),
        ("DifferentialPrivacyServerSideAdaptiveClipping", "hides nothing from that server"),
        ("FedXgbBagging", "boosted trees"),
        ("FedXgbCyclic", "boosted trees"),
    ],
)
def test_a_strategy_whose_clients_would_have_to_do_more_is_refused_by_name(
    name: str, why: str
) -> None:
    with pytest.raises(SpecError, match=rf"^train\.strategy: {name} .*{why}"):
        create_strategy(small_spec(f"train.strategy={name}"))


NEEDED = {"QFedAvg": "{client_learning_rate: 0.05}", "FedProx": "{proximal_mu: 0.5}"}
ASKED = {"server-round", "proximal-mu"}  # what clients know to do


@pytest.mark.parametrize(
    "name", [n for n in flower.__all__ if n not in ("Strategy", "Result") and _beyond(n) is None]
)
def test_no_strategy_asks_its_clients_for_what_they_do_not_do(name: str) -> None:
    options = NEEDED.get(name, "{}")
    strategy = create_strategy(
        small_spec(f"train={{strategy: {name}, strategy_options: {options}}}")
    )
    nodes = Cohort(cast(Grid, None), [1, 2])
    model = ArrayRecord({"w": torch.zeros(2)})
    (message, *_) = strategy.configure_train(1, model, ConfigRecord(), nodes)
    config = next(iter(message.content.config_records.values()))
    assert set(config) <= ASKED
    assert wire.proximal_of(message) == (0.5 if name == "FedProx" else 0.0)


def test_fedprox_pushes_nobody_away() -> None:
    with pytest.raises(SpecError, match=r"proximal_mu is -1.*below zero"):
        create_strategy(
            small_spec("train={strategy: FedProx, strategy_options: {proximal_mu: -1.0}}")
        )

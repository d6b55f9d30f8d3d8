"""The adversarial server: sees every reply, changes no aggregate, survives bad clients."""

from __future__ import annotations

from pathlib import Path

import flwr.serverapp.strategy as flower
import pytest
import torch
from safetensors.torch import load_file

from fedsim.audit.stages import audit, federate
from fedsim.campaign.plan import prepare
from fedsim.clients.app import ClientSide, train_client
from fedsim.core.errors import RunError, SpecError
from fedsim.core.observation import read_observation
from fedsim.core.run import Run, list_observations
from fedsim.core.vault import Vault
from fedsim.federation.aggregation import create_strategy
from fedsim.federation.checkpoint import read_checkpoint
from fedsim.federation.engines import run_federation
from fedsim.federation.strategy import AdversarialStrategy
from tests.conftest import small_spec


def label_seen_by(root: Path, spec, client: int) -> int:
    """What a client trains on in round one, found out by letting it."""
    weights = prepare(spec).initial
    train_client(ClientSide(spec, root), 1, client, weights)
    return int(Vault(root).read(1, client).labels[0])


def test_every_reply_becomes_an_observation(tmp_path: Path) -> None:
    spec = small_spec()
    run = federate(spec, tmp_path / "run")
    seen = [(o.round, o.client) for o in map(read_observation, list_observations(run.observations))]
    assert seen == [(r, c) for r in (1, 2) for c in spec.cohort(r)]


def test_only_the_audited_rounds_are_kept(tmp_path: Path) -> None:
    run = federate(small_spec("audit.rounds=[2]"), tmp_path / "run")
    assert [p.parent.name for p in list_observations(run.observations)] == ["round-0002"] * 2
    assert not (run.root / "spool").exists()
    assert list(run.rounds["round"]) == [1, 2]


@pytest.mark.parametrize("upload", ["gradient", "delta"])
def test_the_aggregate_is_the_mean_of_what_the_clients_did(tmp_path: Path, upload: str) -> None:
    spec = small_spec("train.rounds=1", f"train.upload={upload}")
    run = federate(spec, tmp_path / "run")
    seen = [read_observation(p) for p in list_observations(run.observations)]
    after = load_file(run.checkpoint)
    for name, sent in prepare(spec).initial.items():
        mean = sum(o.update.tensors[name] for o in seen) / len(seen)
        expected = sent - spec.train.lr * mean if upload == "gradient" else sent + mean
        torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-7)


QFEDAVG = (
    "train={rounds: 2, evaluate: false, strategy: QFedAvg, "
    "strategy_options: {client_learning_rate: 0.05}}"
)


def test_a_strategy_that_computes_in_place_leaves_what_is_frozen_as_it_was(tmp_path: Path) -> None:
    spec = small_spec(QFEDAVG, "defenses=[{name: frozen_pe}]", "data.clients=3")
    run = federate(spec, tmp_path / "run")
    before, after = (
        prepare(spec, willing=True).initial["pos_embed"],
        read_checkpoint(run).arrays["pos_embed"],
    )
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)


def test_a_strategy_without_a_mind_for_counters_is_refused_before_a_round(tmp_path: Path) -> None:
    spec = small_spec(QFEDAVG, "model={name: resnet10t}", "data.clients=2")
    with pytest.raises(SpecError, match="QFedAvg cannot average counters"):
        federate(spec, tmp_path / "run")
    assert not list_observations(tmp_path / "run" / "observations")


def test_capturing_does_not_change_the_training(tmp_path: Path) -> None:
    """Kept, spooled for the aggregation only, or not captured at all: the same model."""
    from fedsim.federation.engines import run_federation
    from fedsim.federation.strategy import AdversarialStrategy

    spec = small_spec()
    plan = prepare(spec)
    models = []
    for capture in (True, False):
        run = Run.create(tmp_path / f"capture-{capture}", spec)
        strategy = AdversarialStrategy(
            create_strategy(spec), spec, run, plan.public, capture=capture
        )
        run_federation(spec, run, strategy, plan.initial)
        models.append(read_checkpoint(run)[1])
        assert bool(list_observations(run.observations)) is capture
    spooled = federate(small_spec("audit.rounds=[2]"), tmp_path / "spooled")
    models.append(read_checkpoint(spooled)[1])
    for other in models[1:]:
        assert all(torch.equal(models[0][name], other[name]) for name in models[0])


def test_any_flower_strategy_can_be_wrapped(tmp_path: Path) -> None:
    plain = federate(small_spec(), tmp_path / "plain")
    wrapped = federate(small_spec("train.strategy=FedAdam"), tmp_path / "adam")
    median = federate(small_spec("train.strategy=FedMedian"), tmp_path / "median")
    assert list(wrapped.rounds["clients"]) == list(median.rounds["clients"]) == [2, 2]
    first, second = load_file(plain.checkpoint), load_file(wrapped.checkpoint)
    assert not torch.equal(first["head.weight"], second["head.weight"])
    assert isinstance(create_strategy(small_spec("train.strategy=FedAvgM")), flower.FedAvgM)


def test_an_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean 'FedAvg'"):
        create_strategy(small_spec("train.strategy=FedAvq"))
    with pytest.raises(SpecError, match="strategy_options"):
        create_strategy(small_spec("train.strategy_options={speed: 3}"))


def test_a_client_that_raises_is_left_out_and_the_round_goes_on(tmp_path: Path) -> None:
    spec = small_spec("train.rounds=1")
    label = label_seen_by(tmp_path / "peek", spec, spec.cohort(1)[0])
    broken = small_spec(
        "train.rounds=1", f"defenses=[{{name: 'tests.faults:OnLabel', label: {label}}}]"
    )
    run = federate(broken, tmp_path / "run")
    assert list(run.rounds["clients"]) == [1]
    assert list(run.rounds["failed"]) == [1]
    assert [e["kind"] for e in run.events()] == ["client_failed"]
    assert "this client is broken" in run.events()[0]["message"]


def test_a_client_whose_error_speaks_of_the_vault_is_left_out_like_any_other(
    tmp_path: Path,
) -> None:
    spec = small_spec("train.rounds=1")
    label = label_seen_by(tmp_path / "peek", spec, spec.cohort(1)[0])
    words = "the vault cannot be written: No space left on device."
    fault = f"{{name: 'tests.faults:OnLabel', label: {label}, words: '{words}'}}"
    run = federate(small_spec("train.rounds=1", f"defenses=[{fault}]"), tmp_path / "run")
    assert list(run.rounds["failed"]) == [1]
    assert [event["kind"] for event in run.events()] == ["client_failed"]


def test_a_vault_of_a_client_elsewhere_is_the_clients_own_misfortune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    spec = small_spec("train.rounds=1")
    plan, run = prepare(spec), Run.create(tmp_path / "run", spec, deployed=True)
    strategy = AdversarialStrategy(create_strategy(spec), spec, run, plan.public)
    Vault(run.vault).keys.own()
    monkeypatch.setattr("fedsim.core.vault.write_atomically", full)
    run_federation(spec, run, strategy, plan.initial)
    assert {event["kind"] for event in run.events()} == {"client_failed"}
    assert list(run.rounds["clients"]) == [0]


def test_a_nan_update_is_kept_out_of_the_aggregate_and_reported(tmp_path: Path) -> None:
    spec = small_spec("train.rounds=1")
    label = label_seen_by(tmp_path / "peek", spec, spec.cohort(1)[0])
    poisoned = small_spec(
        "train.rounds=1", f"defenses=[{{name: 'tests.faults:OnLabel', label: {label}, how: nan}}]"
    )
    run = federate(poisoned, tmp_path / "run")
    assert list(run.rounds["clients"]) == [1]
    assert "not finite" in run.events()[0]["message"]
    assert all(torch.isfinite(t).all() for t in load_file(run.checkpoint).values())


def test_a_run_without_a_single_update_is_an_error_with_its_reason(tmp_path: Path) -> None:
    # BatchNorm in train mode cannot learn from one value a channel.
    spec = small_spec("model={name: resnet10t}", "attacks=[{name: prior_only}]")
    with pytest.raises(RunError, match="more than 1 value per channel"):
        federate(spec, tmp_path / "run")


def test_local_batchnorm_statistics_stay_with_the_client(tmp_path: Path) -> None:
    model = "model={name: resnet10t}"
    more = ("train.batch_size=2", "train.clients_per_round=4", "attacks=[{name: prior_only}]")
    local = federate(small_spec(model, *more, "train.batchnorm=local"), tmp_path / "local")
    shared = federate(small_spec(model, *more), tmp_path / "shared")
    for run, travels in ((local, False), (shared, True)):
        for path in list_observations(run.observations):
            assert bool(read_observation(path).update.buffers) is travels
    name = "bn1.running_mean"
    assert torch.equal(load_file(local.checkpoint)[name], prepare(local.spec).initial[name])
    assert not torch.equal(load_file(shared.checkpoint)[name], prepare(shared.spec).initial[name])
    first, second = (Vault(local.vault).read_state(r, 0)[name] for r in (2, 3))
    assert not torch.equal(first, second)


def test_secure_aggregation_trains_the_same_model_and_hides_every_update(tmp_path: Path) -> None:
    plain = audit(small_spec(), tmp_path / "plain")
    secret = audit(small_spec("defenses=[{name: secure_aggregation}]"), tmp_path / "secret")
    one, two = (read_checkpoint(run)[1] for run in (plain, secret))
    for name in one:
        assert torch.allclose(one[name].float(), two[name].float(), atol=1e-6)
    exact = plain.scores[plain.scores.attack == "patch_solve"]
    assert (exact.psnr == 160).all()
    hidden = secret.scores[secret.scores.attack == "patch_solve"]
    assert (hidden.psnr < 20).all()
    assert (secret.scores.canary < 1e-6).all()
    with pytest.raises(SpecError, match="list it as the last"):
        audit(
            small_spec("defenses=[{name: secure_aggregation}, {name: gaussian_noise}]"),
            tmp_path / "wrong",
        )


def test_fedprox_reaches_the_clients_and_moves_them_less(tmp_path: Path) -> None:
    train = "train={rounds: 1, clients_per_round: 1, upload: delta, local_steps: 4, evaluate: false"
    plain = federate(small_spec(f"{train}}}"), tmp_path / "plain")
    options = "strategy: FedProx, strategy_options: {proximal_mu: 10.0}"
    pulled = federate(small_spec(f"{train}, {options}}}"), tmp_path / "pulled")
    free, held = (
        torch.cat([t.flatten() for t in read_observation(path).update.tensors.values()]).norm()
        for run in (plain, pulled)
        for path in list_observations(run.observations)
    )
    assert float(held) < 0.9 * float(free)


def test_the_learning_rate_of_each_round_is_public_and_what_the_server_steps_by(
    tmp_path: Path,
) -> None:
    spec = small_spec("train.round_schedule={name: step, factor: 0.1}", "train.clients_per_round=1")
    run = federate(spec, tmp_path / "run")
    first, second = (read_observation(path) for path in list_observations(run.observations))
    rates = [o.public.protocol.lr for o in (first, second)]
    assert rates == pytest.approx([0.05, 0.005])
    after = load_file(run.checkpoint)
    for name, gradient in second.update.tensors.items():
        expected = second.weights[name] - rates[1] * gradient
        torch.testing.assert_close(after[name], expected)

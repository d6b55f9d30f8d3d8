"""The canary, shown faults: clients that do not follow the protocol the server announced. An attack
that fails on them has shown nothing, and the verdict must say so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import fedsim
import fedsim.clients.app
from fedsim.audit.stages import audit, conclude, federate
from fedsim.clients.app import ClientSide
from fedsim.core.files import read_json, save_tensors, tensors_from_bytes, write_json
from fedsim.core.keyring import Key, Keyring
from fedsim.core.learning import Update
from fedsim.core.losses import Loss
from fedsim.core.observation import Observation, read_observation
from fedsim.core.optimizers import Schedule
from fedsim.core.run import Run, list_observations, observation_name, truth_path, vault_key_path
from fedsim.core.spec import Spec, TrainSpec
from fedsim.core.vault import Vault
from fedsim.scoring.canary import (
    CANARY_TOLERANCE,
    Kept,
    canary,
    check_canaries,
    computed_from,
    keep_canaries,
    tolerance_of,
)
from fedsim.scoring.scores import columns
from tests.conftest import small_spec
from tests.staging import short_report

WEAK = "attacks=[{name: inverting_gradients, steps: 2}]"  # so that no picture comes back


VIT = (
    "model.options={patch_size: 8, depth: 1, embed_dim: 48, num_heads: 2}",
    "train={rounds: 1, clients_per_round: 2, evaluate: false}",
)


TWO_ROUNDS = (*VIT, "train.rounds=2", "audit.rounds=[2]")


SEVERAL_STEPS = (
    VIT[0],
    "train={rounds: 1, clients_per_round: 2, upload: delta, local_steps: 2, evaluate: false}",
)


CNN = (
    "model={name: resnet18, options: {layers: [1, 1, 1, 1], channels: [8, 8, 8, 8]}}",
    "train={rounds: 1, clients_per_round: 2, batch_size: 4, evaluate: false}",
)


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Run]:
    """The same federation with honest clients; once for each."""
    return cache(
        lambda words: audit(small_spec(WEAK, *words), tmp_path_factory.mktemp("run") / "x")
    )


@contextmanager
def clients_of(*differences: str) -> Iterator[None]:
    """Clients that follow another spec than the server's."""

    def side(spec: Spec, vault: Path, data: Path | None = None) -> ClientSide:
        return ClientSide(small_spec(WEAK, *differences), vault, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsim.federation.engines.ClientSide", side)
        yield


@contextmanager
def stale_clients() -> Iterator[None]:
    """Clients that train on what the server sent a round ago."""
    train, sent = fedsim.clients.app.train_client, dict[int, dict[str, Tensor]]()

    def late(side: ClientSide, round_: int, client: int, weights: dict[str, Tensor]) -> Update:
        sent.setdefault(round_, weights)
        return train(side, round_, client, sent.get(round_ - 1, weights))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedsim.clients.app, "train_client", late)
        yield


@contextmanager
def clients_that_send(change: Callable[[Update], Update]) -> Iterator[None]:
    """Clients that learn as announced and send something else."""
    learn = fedsim.clients.app.learn

    def otherwise(*args: Any, **options: Any) -> Update:
        return change(learn(*args, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedsim.clients.app, "learn", otherwise)
        yield


def verdict(run: Run) -> dict:
    return run.summary["verdicts"][0]


def assert_misspecified(run: Run, honest: Run) -> None:
    assert verdict(honest)["verdict"] in ("NOT RECOVERED", "PARTIAL")
    assert verdict(honest)["canary"]["ok"]
    assert verdict(run)["verdict"] == "MIS-SPECIFIED"
    assert verdict(run)["canary"]["worst"] > 10 * CANARY_TOLERANCE
    assert "say nothing about safety" in verdict(run)["words"]
    assert "No conclusion" in run.report.read_text()


FAULTS = {
    "dropout left on": (VIT, ("model.options.proj_drop_rate=0.1",)),
    "BatchNorm in train mode on one side": (CNN, ("train.mode=eval",)),
    "another normalisation": (VIT, ("data.mean=[0.485, 0.456, 0.406]",)),
    "a learning rate mis-declared": (SEVERAL_STEPS, ("train.lr=0.06",)),
    "a defense that was not declared": (
        VIT,
        ("defenses=[{name: gaussian_noise, std: 0.01, relative: true}]",),
    ),
    "momentum that was not announced": (SEVERAL_STEPS, ("train.momentum=0.1",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_canary_catches(
    fault: str, control: Callable[[tuple[str, ...]], Run], tmp_path: Path
) -> None:
    federation, differences = FAULTS[fault]
    with clients_of(*federation, *differences):
        run = audit(small_spec(WEAK, *federation), tmp_path / "run")
    assert_misspecified(run, control(federation))


def test_the_canary_catches_a_stale_global_model(
    control: Callable[[tuple[str, ...]], Run], tmp_path: Path
) -> None:
    with stale_clients():
        run = audit(small_spec(WEAK, *TWO_ROUNDS), tmp_path / "run")
    assert_misspecified(run, control(TWO_ROUNDS))


def _moved_mean(update: Update) -> Update:
    name = next(name for name in update.buffers if name.endswith("running_mean"))
    return replace(update, buffers={**update.buffers, name: update.buffers[name] + 0.01})


def _one_more_batch(update: Update) -> Update:
    name = next(name for name in update.buffers if name.endswith("num_batches_tracked"))
    return replace(update, buffers={**update.buffers, name: update.buffers[name] + 1})


UNCOUNTED = "train.max_examples=400"  # as where the server cannot tell how many there are
LIES: dict[str, tuple[tuple[str, ...], Callable[[Update], Update]]] = {
    "400 examples for one": (
        (*VIT, UNCOUNTED),
        lambda update: replace(update, num_examples=400),
    ),
    "400 examples over several steps": (
        (*SEVERAL_STEPS, UNCOUNTED),
        lambda update: replace(update, num_examples=400),
    ),
    "BatchNorm statistics of another batch": (CNN, _moved_mean),
    "a batch more than there was": (CNN, _one_more_batch),
}


@pytest.mark.parametrize("lie", LIES)
def test_the_canary_catches_clients_that_say(
    lie: str, control: Callable[[tuple[str, ...]], Run], tmp_path: Path
) -> None:
    federation, change = LIES[lie]
    with clients_that_send(change):
        run = audit(small_spec(WEAK, *federation), tmp_path / "run")
    assert_misspecified(run, control(federation))


def _moved_position(update: Update) -> Update:
    """Other than learned by what is less than the tolerance of the whole, all in one tensor."""
    name = "pos_embed"
    whole = sum(float(t.double().square().sum()) for t in update.tensors.values()) ** 0.5
    moved = torch.randn(update.tensors[name].shape, generator=torch.Generator().manual_seed(5))
    moved *= 0.9 * CANARY_TOLERANCE * whole / float(moved.norm())
    return replace(update, tensors={**update.tensors, name: update.tensors[name] + moved})


def test_the_canary_catches_a_change_of_one_tensor_that_is_nothing_beside_the_whole(
    tmp_path: Path,
) -> None:
    with clients_that_send(_moved_position):
        run = federate(small_spec(*VIT), tmp_path / "run")
    chosen = [(1, client) for client in run.spec.cohort(1)]
    assert min(check_canaries(run, chosen).values()) > CANARY_TOLERANCE


@pytest.fixture
def quick_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that reads the summary alone."""
    monkeypatch.setattr("fedsim.report.write_report", short_report)


@pytest.mark.usefixtures("quick_report")
def test_a_canary_written_by_hand_is_computed_again(tmp_path: Path) -> None:
    with clients_that_send(LIES["400 examples for one"][1]):
        run = audit(small_spec(WEAK, *VIT, UNCOUNTED), tmp_path / "run")
    content = read_json(run.canaries)
    for kept in content["canaries"].values():
        kept["error"] = 0.0
    write_json(run.canaries, content)
    conclude(run)
    assert verdict(run)["verdict"] == "MIS-SPECIFIED"
    assert "canaries.json was altered" in run.events()[-1]["message"]
    names = [observation_name(1, client) for client in run.spec.cohort(1)]
    write_json(run.canaries, dict.fromkeys(names, 0.0))  # as an older version kept them
    conclude(run)
    assert verdict(run)["verdict"] == "MIS-SPECIFIED"


@pytest.mark.usefixtures("quick_report")
def test_a_canary_that_somebody_wrote_without_the_vaults_key_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with clients_that_send(LIES["400 examples for one"][1]):
        run = audit(small_spec(WEAK, *VIT, UNCOUNTED), tmp_path / "run")
    vault = Vault(run.vault)
    known = {
        observation_name(1, client): Kept(
            error=0.0,
            of=computed_from(
                run.observations / f"{observation_name(1, client)}.json", vault.read(1, client), {}
            ),
        )
        for client in run.spec.cohort(1)
    }
    with monkeypatch.context() as patch:  # with a key of their own
        patch.setattr(Keyring, "present", lambda self: Key(b"1" * 32))
        keep_canaries(run, known)
    conclude(run)
    assert verdict(run)["verdict"] == "MIS-SPECIFIED"
    keep_canaries(run, known)  # whoever has the key is believed
    conclude(run)
    assert verdict(run)["canary"]["ok"]


@pytest.mark.usefixtures("quick_report")
def test_pictures_put_beside_those_a_client_learned_from_are_told_and_not_scored(
    control: Callable[[tuple[str, ...]], Run], tmp_path: Path
) -> None:
    run = Run(shutil.copytree(control(VIT).root, tmp_path / "run"))
    vault, client = Vault(run.vault), run.spec.cohort(1)[0]
    truth = vault.read(1, client)
    decoys = torch.full((9, *truth.images.shape[1:]), 0.5)
    labels = torch.cat([truth.labels, torch.zeros(9, dtype=torch.long)])
    images = torch.cat([truth.images, decoys])
    vault.write(1, client, replace(truth, images=images, labels=labels))
    conclude(run)
    assert set(run.scores["client"]) == set(run.spec.cohort(1)) - {client}
    told = [event["message"] for event in run.events() if event["kind"] == "not_scored"]
    assert told
    assert all("it has images that no batch uses" in message for message in told)


def test_a_canary_is_computed_once_for_what_it_was_computed_from(
    control: Callable[[tuple[str, ...]], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(shutil.copytree(control(VIT).root, tmp_path / "run"))
    chosen = [(1, client) for client in run.spec.cohort(1)]
    calls = list[str]()

    def counted(observation: Observation, *rest: object) -> float:
        calls.append(observation.name)
        return 0.5

    monkeypatch.setattr("fedsim.scoring.canary.canary", counted)
    before = check_canaries(run, chosen)
    assert not calls
    path = run.observations / f"{observation_name(*chosen[0])}.json"
    write_json(path, read_json(path) | {"loss": 0.25})
    after = check_canaries(run, chosen)
    assert calls == [observation_name(*chosen[0])]
    assert after == {**before, calls[0]: 0.5}


def swap(first: Path, second: Path) -> None:
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


@pytest.mark.usefixtures("quick_report")
def test_truths_that_changed_places_are_told_and_never_a_miss(
    control: Callable[[tuple[str, ...]], Run], tmp_path: Path
) -> None:
    honest = control(VIT)
    run = Run(shutil.copytree(honest.root, tmp_path / "run"))
    swap(*(truth_path(run.vault, 1, client) for client in run.spec.cohort(1)))
    conclude(run)
    assert verdict(run)["verdict"] == "NO RESULT"
    assert run.scores.empty
    told = [event["message"] for event in run.events() if event["kind"] == "not_scored"]
    assert len(told) == len(honest.scores)
    assert all("is damaged, or was put in the place of another" in message for message in told)
    audit(run.spec, run.root)
    kept = [column for column in columns() if column != "seconds"]
    pd.testing.assert_frame_equal(run.scores[kept], honest.scores[kept])
    assert verdict(run)["verdict"] == verdict(honest)["verdict"]
    assert any(event["kind"] == "mended" for event in run.events())


@pytest.mark.usefixtures("quick_report")
def test_truths_that_do_not_say_whose_they_are_are_found_by_a_canary_of_their_own(
    control: Callable[[tuple[str, ...]], Run], tmp_path: Path
) -> None:
    run = Run(shutil.copytree(control(VIT).root, tmp_path / "run"))
    places = [truth_path(run.vault, 1, client) for client in run.spec.cohort(1)]
    opened = {place: Vault(run.vault)._content(place) for place in places}
    for place, content in opened.items():  # as an older version wrote them, without a key
        tensors, metadata = tensors_from_bytes(content, place)
        about = json.loads(metadata["about"])
        old = {key: about[key] for key in ("batches", "defense_seed", "trail", "stateful")}
        save_tensors(place, tensors, {"about": json.dumps(old)})
    vault_key_path(run.vault).unlink()
    audit(run.spec, run.root)
    assert verdict(run)["verdict"] == verdict(control(VIT))["verdict"]
    assert not run.events()
    swap(*places)
    audit(run.spec, run.root)
    assert verdict(run)["verdict"] == "MIS-SPECIFIED"


def test_one_client_that_strays_among_honest_ones_is_enough(
    control: Callable[[tuple[str, ...]], Run], tmp_path: Path
) -> None:
    """The first client of round one alone trains on other weights."""
    train, spec = fedsim.clients.app.train_client, small_spec(WEAK, *VIT)
    stray = spec.cohort(1)[0]

    def strays(side: ClientSide, round_: int, client: int, weights: dict[str, Tensor]) -> Update:
        if (round_, client) == (1, stray):
            weights = {name: 1.01 * tensor for name, tensor in weights.items()}
        return train(side, round_, client, weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedsim.clients.app, "train_client", strays)
        run = audit(spec, tmp_path / "run")
    assert_misspecified(run, control(VIT))
    caught = run.scores.query(f"canary > {CANARY_TOLERANCE}")
    assert set(zip(caught["round"], caught["client"], strict=True)) == {(1, stray)}


def test_clients_that_say_what_they_do_pass(tmp_path: Path) -> None:
    """What the faults change is no fault where it is announced."""
    for number, (federation, differences) in enumerate(FAULTS.values()):
        if "drop" in differences[0]:
            continue  # its mask is the client's own coin, which nobody can announce
        run = audit(small_spec(WEAK, *federation, *differences), tmp_path / str(number))
        assert verdict(run)["canary"]["ok"], differences


def test_the_canary_knows_what_a_client_kept_back(tmp_path: Path) -> None:
    run = audit(
        small_spec(
            "defenses=[{name: top_k, sparsity: 0.8, feedback: true}]",
            "data.clients=2",
            "train={rounds: 3, clients_per_round: 2, evaluate: false}",
            "audit={rounds: [3], victims: 2}",
        ),
        tmp_path / "run",
    )
    canaries = run.scores["canary"]
    assert len(canaries)
    assert float(canaries.max()) < 1e-5
    for state in run.vault.rglob("*.state.safetensors"):  # without its memory it cannot replay
        state.unlink()
    (run.root / "canaries.json").unlink()
    conclude(run)
    assert float(run.scores["canary"].max()) > 1e-2


def test_noise_that_is_declared_passes_the_canary_and_lowers_the_score(tmp_path: Path) -> None:
    spec = small_spec("defenses=[{name: gaussian_noise, std: 0.1, relative: true}]")
    run = audit(spec, tmp_path / "run")
    verdict = run.summary["verdicts"][0]
    assert verdict["canary"]["ok"]
    assert verdict["metrics"]["psnr"]["worst_case"] < 25
    truth = Vault(run.vault).read(1, spec.cohort(1)[0])
    assert [entry["defense"] for entry in truth.trail] == ["GaussianNoise"]


def test_several_local_steps_replay_through_the_canary(tmp_path: Path) -> None:
    spec = small_spec(
        "train={rounds: 1, upload: delta, local_steps: 3, momentum: 0.9, clip: 1.0, "
        "weight_decay: 0.01, evaluate: false, lr: 0.01}"
    )
    run = audit(spec, tmp_path / "run")
    assert run.summary["verdicts"][0]["canary"]["ok"]
    assert len(run.scores[run.scores["attack"] == "prior_only"]) == 4 * 3


@pytest.mark.parametrize(
    "lie",
    [
        {"protocol": {"lr": 0.1}},
        {"protocol": {"mean": (0.4, 0.5, 0.6)}},
        {"defenses": [{"name": "gaussian_noise", "std": 0.01}]},
    ],
)
def test_a_replay_by_a_misdeclared_protocol_is_far_from_what_was_observed(
    tmp_path: Path, lie: dict
) -> None:
    spec = small_spec("train={rounds: 1, upload: delta, clients_per_round: 2, evaluate: false}")
    run = federate(spec, tmp_path / "run")
    observation = read_observation(list_observations(run.observations)[0])
    truth = Vault(run.vault).read(observation.round, observation.client)
    if "protocol" in lie:
        lie = {"protocol": replace(observation.public.protocol, **lie["protocol"])}
    told = replace(observation, public=replace(observation.public, **lie))
    cpu = torch.device("cpu")
    assert canary(observation, truth, cpu) < CANARY_TOLERANCE / 10
    assert canary(told, truth, cpu) > 10 * CANARY_TOLERANCE


def test_dropout_that_the_attacker_cannot_replay_is_misspecified(tmp_path: Path) -> None:
    blind = "attacks=[{name: inverting_gradients, steps: 2}]"
    run = audit(small_spec("model.options.proj_drop_rate=0.5", blind), tmp_path / "run")
    assert run.summary["verdicts"][0]["verdict"] == "MIS-SPECIFIED"


@pytest.mark.parametrize("defenses", ["[]", "[{name: secure_aggregation}]"])
def test_a_wrong_replay_is_noticed_under_masks_too(defenses: str, tmp_path: Path) -> None:
    spec = small_spec(f"defenses={defenses}", "train.rounds=1")
    run = federate(spec, tmp_path / "run")
    path = list_observations(run.observations)[0]
    seen = read_observation(path)
    truth = Vault(run.vault).read(seen.round, seen.client)
    cohort, cpu = spec.cohort(1), torch.device("cpu")
    assert canary(seen, truth, cpu, cohort) < 1e-6
    moved = {name: t + 0.3 * torch.ones_like(t) for name, t in seen.weights.items()}
    assert canary(replace(seen, weights=moved), truth, cpu, cohort) > 1e-2


LOCAL = "train={rounds: 1, clients_per_round: 1, upload: delta, local_steps: 3, batch_size: 2"
ONE = "train={rounds: 1, clients_per_round: 1, batch_size: 2"
AUGMENT = "augment: [{name: RandomResizedCrop, scale: [0.5, 1]}, {name: RandAugment}"
# How people train, and an announcement of it that is wrong.
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "augmented": (f"{ONE}, {AUGMENT}]", {"mean": (0.4, 0.4, 0.4)}),
    "mixed": (f"{ONE}, {AUGMENT}, {{name: CutMix}}]", {"loss": Loss(label_smoothing=0.1)}),
    "smoothed": (f"{ONE}, loss: {{label_smoothing: 0.1}}", {"loss": Loss()}),
    "balanced": (f"{ONE}, loss: {{weights: balanced}}", {"loss": Loss()}),
    "adam": (f"{LOCAL}, optimizer: adam, lr: 0.001", {"optimizer": "adamw", "weight_decay": 0.1}),
    "scheduled": (f"{LOCAL}, schedule: {{name: cosine}}", {"schedule": Schedule()}),
    "accumulated": (f"{LOCAL}, accumulate: 2, momentum: 0.9", {"momentum": 0.8}),
    "proximal": (
        f"{LOCAL}, strategy: FedProx, strategy_options: {{proximal_mu: 1.0}}",
        {"proximal": 0.0},
    ),
    "bfloat16": (f"{ONE}, precision: bfloat16", {"loss": Loss(label_smoothing=0.1)}),
    "float16": (f"{ONE}, precision: float16", {"loss": Loss(label_smoothing=0.1)}),
    "uploaded in float16": (f"{ONE}, upload_dtype: float16", {"upload_dtype": "float32"}),
    "uploaded in bfloat16": (f"{ONE}, upload_dtype: bfloat16", {"upload_dtype": "float16"}),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_the_canary_holds_for_training_as_it_is_announced_and_for_no_other(
    name: str, tmp_path: Path
) -> None:
    train, wrong = TRAININGS[name]
    spec = small_spec(VIT[0], f"{train}, evaluate: false}}")
    run = federate(spec, tmp_path / "run")
    (path,) = list_observations(run.observations)
    observation = read_observation(path)
    truth = Vault(run.vault).read(1, observation.client)
    assert canary(observation, truth, torch.device("cpu")) <= CANARY_TOLERANCE
    protocol = observation.public.protocol
    if name == "balanced":  # which the announcement does not tell, and the vault does
        truth = replace(truth, class_weights=())
    public = replace(observation.public, protocol=replace(protocol, **wrong))
    other = canary(replace(observation, public=public), truth, torch.device("cpu"))
    assert other > tolerance_of(protocol)


def test_half_of_the_digits_leave_more_room_and_never_less_than_is_usual() -> None:
    for precision in ("float32", "float16", "bfloat16"):
        train = TrainSpec(precision=precision)  # type: ignore[arg-type]
        assert tolerance_of(train) >= CANARY_TOLERANCE
    assert tolerance_of(TrainSpec()) == CANARY_TOLERANCE
    assert tolerance_of(TrainSpec(precision="bfloat16")) > tolerance_of(
        TrainSpec(precision="float16")
    )

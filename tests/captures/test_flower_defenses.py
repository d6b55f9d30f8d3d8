"""Flower's own defenses: what a captured strategy shows of them, in real rounds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Strategy,
)

import fedsim
from fedsim.captures.flower_defenses import (
    KEY_CLIPPING_NORM,
    Recognised,
    clipping,
    contradiction,
    recognised,
    within,
    wrappers_around,
)
from fedsim.core.run import Run
from fedsim.defenses.applied import declared
from fedsim.federation.grids import InlineGrid
from tests import flower_app
from tests import flower_task as task
from tests.flower_app import App, captured

CLIENT_SIDE = {
    DifferentialPrivacyClientSideFixedClipping: fixedclipping_mod,
    DifferentialPrivacyClientSideAdaptiveClipping: adaptiveclipping_mod,
}
STEP = torch.tensor([3.0, 4.0])  # of norm 5


class ListGrid(InlineGrid):
    """Replies in a list, as Flower's own grids hand them over: its adaptive wrappers go through
    them twice."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return list(super().send_and_receive(messages, timeout=timeout))


class Watching(FedAvg):
    """A strategy in a capture's place: what it recognises when it is asked for a round, the norm
    that was sent, and the updates it is handed."""

    def __init__(self, inner: FedAvg | None = None) -> None:
        super().__init__(fraction_evaluate=0)
        self.inner = inner or FedAvg(fraction_evaluate=0)
        self.seen: list[Recognised] = []
        self.norms: dict[int, float] = {}
        self.sizes: list[float] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.seen.append(recognised(self, wrappers_around(self)))
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        if KEY_CLIPPING_NORM in config:
            self.norms[server_round] = config[KEY_CLIPPING_NORM]
        self.sent = arrays.to_torch_state_dict()["w"]
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        for reply in replies:
            moved = reply.content["arrays"].to_torch_state_dict()["w"] - self.sent
            self.sizes.append(float(moved.norm()))
        return self.inner.aggregate_train(server_round, replies)


def run(strategy: FedAvg, mods: list | None = None, rounds: int = 1) -> None:
    """Rounds of two clients, who each move the weights by `STEP`."""
    app = ClientApp(mods=mods or [])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        moved = message.content["arrays"].to_torch_state_dict()["w"] + STEP
        metrics = MetricRecord({"num-examples": 1, "loss": 0.5})
        content = RecordDict({"arrays": ArrayRecord({"w": moved}), "metrics": metrics})
        return Message(content=content, reply_to=message)

    strategy.start(ListGrid(app, 2), ArrayRecord({"w": torch.zeros(2)}), num_rounds=rounds)


@pytest.mark.parametrize("wrapper", CLIENT_SIDE)
@pytest.mark.parametrize("outermost", [True, False])
def test_clipping_of_clients_is_recognised_on_both_sides_of_a_capture(wrapper, outermost) -> None:
    """The wrapper sends the norm and its mod clips to it; noise comes after the update is here."""
    fixed = wrapper is DifferentialPrivacyClientSideFixedClipping
    told = {"noise_multiplier": 0.01, "num_sampled_clients": 2}
    told["clipping_norm" if fixed else "initial_clipping_norm"] = 0.5
    if outermost:
        watching = Watching(wrapper(FedAvg(fraction_evaluate=0), **told))
        run(watching, [CLIENT_SIDE[wrapper]])
    else:
        watching = Watching()
        run(wrapper(watching, **told), [CLIENT_SIDE[wrapper]])
    (seen,) = watching.seen
    assert seen.norm == 0.5
    assert watching.norms == {1: 0.5}
    assert watching.sizes == pytest.approx([0.5, 0.5])
    (sentence,) = seen.sentences
    assert sentence.startswith(wrapper.__name__)
    assert CLIENT_SIDE[wrapper].__name__ in sentence
    assert "without noise" in sentence


@pytest.mark.parametrize(
    ("wrapper", "key"),
    [
        (DifferentialPrivacyServerSideFixedClipping, "clipping_norm"),
        (DifferentialPrivacyServerSideAdaptiveClipping, "initial_clipping_norm"),
    ],
)
def test_clipping_on_the_server_leaves_what_arrives_as_it_is(wrapper, key) -> None:
    """So nothing is declared of it; unless it stands around the capture, which then is shown what
    was clipped already."""
    told = {key: 0.5, "noise_multiplier": 0.01, "num_sampled_clients": 2}
    inside = Watching(wrapper(FedAvg(fraction_evaluate=0), **told))
    run(inside)
    assert inside.sizes == pytest.approx([5.0, 5.0])
    assert inside.seen[0].norm is None
    assert "arrive as clients made them" in inside.seen[0].sentences[0]

    around = Watching()
    run(wrapper(around, **told))
    assert around.sizes == pytest.approx([0.5, 0.5])
    assert around.seen[0].norm == 0.5
    assert "capture the wrapper to see what arrived" in around.seen[0].sentences[0]


def test_a_plain_strategy_shows_nothing() -> None:
    watching = Watching()
    run(watching)
    assert watching.seen == [Recognised()]
    assert watching.norms == {}


def test_the_norms_of_an_adaptive_wrapper_are_those_of_the_rounds() -> None:
    wrapper = DifferentialPrivacyClientSideAdaptiveClipping(
        FedAvg(fraction_evaluate=0),
        noise_multiplier=0.0,
        num_sampled_clients=2,
        initial_clipping_norm=0.5,
    )
    watching = Watching(wrapper)
    run(watching, [adaptiveclipping_mod], rounds=3)
    first, second, third = watching.norms.values()
    assert first > second > third  # though every update is longer than the norm already
    (defense,) = declared([clipping(watching.norms)])
    for round_, sizes in zip((1, 2, 3), zip(*[iter(watching.sizes)] * 2, strict=True), strict=True):
        assert sizes == pytest.approx([defense.at_round(round_, 0, [0]).norm] * 2)


def test_a_round_of_which_no_norm_is_known_has_that_of_the_round_before() -> None:
    plain = {"name": "clipping", "norm": 0.5, "everything": True}
    assert clipping({1: 0.5, 3: 0.5}) == plain
    assert clipping({1: 0.5, 4: 0.4}) == plain | {"norms": [0.5, 0.5, 0.5, 0.4]}


def test_an_update_longer_than_the_norm_says_that_a_mod_is_missing() -> None:
    wrapper = DifferentialPrivacyClientSideFixedClipping(
        FedAvg(fraction_evaluate=0), noise_multiplier=0.0, clipping_norm=0.5, num_sampled_clients=2
    )
    with_mod, without = Watching(wrapper), Watching(wrapper)
    run(with_mod, [fixedclipping_mod])
    run(without)
    assert contradiction(with_mod.sizes[0], with_mod.norms[1]) is None
    assert "runs without the mod" in str(contradiction(without.sizes[0], without.norms[1]))


# -- whole captures ------------------------------------------------------------------------------


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_app, "InlineGrid", ListGrid)


def wrapped(kind: type[Strategy], strategy: Strategy, norm: float) -> Strategy:
    fixed = "Fixed" in kind.__name__
    told = {"clipping_norm" if fixed else "initial_clipping_norm": norm}
    return kind(strategy, noise_multiplier=0.01, num_sampled_clients=2, **told)


def events(run: Run, kind: str) -> list[str]:
    return [event["message"] for event in run.events() if event["kind"] == kind]


def canary_of(run: Run) -> dict:
    return run.summary["verdicts"][0]["canary"]


@pytest.mark.parametrize("kind", CLIENT_SIDE)
@pytest.mark.parametrize("outermost", [True, False])
@pytest.mark.parametrize("model", [task.Plain, task.Net], ids=["plain", "batchnorm"])
def test_the_canary_of_an_app_whose_clients_clip_holds(
    tmp_path: Path, lists: None, kind: type[Strategy], outermost: bool, model: type
) -> None:
    """Whichever side of the capture the wrapper stands on, and though the norm may change from
    round to round."""
    app = App(model=model, witnessed=True, mods=[CLIENT_SIDE[kind]])
    if outermost:
        strategy = captured(app, tmp_path / "mine", wrapped(kind, app.strategy(), 0.05))
    else:
        strategy = wrapped(kind, captured(app, tmp_path / "mine"), 0.05)
    app.run(strategy, 3)
    end_sessions(strategy)
    run = fedsim.audit(tmp_path / "mine", attacks=[{"name": "prior_only"}])
    (clips,) = run.spec.defenses
    assert (clips.name, clips.params["norm"]) == ("clipping", 0.05)
    assert len(clips.params.get("norms", [])) == (0 if "Fixed" in kind.__name__ else 3)
    assert canary_of(run)["ok"], canary_of(run)
    (sentence,) = events(run, "flower_defense")
    assert sentence.startswith(kind.__name__)
    assert events(run, "not_clipped") == []


@pytest.mark.parametrize("outermost", [True, False])
def test_the_canary_of_an_app_whose_server_clips_holds(
    tmp_path: Path, lists: None, outermost: bool
) -> None:
    kind, app = DifferentialPrivacyServerSideFixedClipping, App(model=task.Plain, witnessed=True)
    if outermost:
        strategy = captured(app, tmp_path / "mine", wrapped(kind, app.strategy(), 0.05))
    else:
        strategy = wrapped(kind, captured(app, tmp_path / "mine"), 0.05)
    app.run(strategy, 2)
    end_sessions(strategy)
    run = fedsim.audit(tmp_path / "mine", attacks=[{"name": "prior_only"}])
    assert len(run.spec.defenses) == (0 if outermost else 1)
    assert canary_of(run)["ok"], canary_of(run)


def test_clients_without_the_mod_are_told_of(tmp_path: Path) -> None:
    kind, app = DifferentialPrivacyClientSideFixedClipping, App(model=task.Plain, witnessed=True)
    app.run(captured(app, tmp_path / "mine", wrapped(kind, app.strategy(), 0.05)), 1)
    run = fedsim.audit(tmp_path / "mine", attacks=[{"name": "prior_only"}])
    assert len(events(run, "not_clipped")) == 2
    assert not canary_of(run)["ok"]


@pytest.mark.parametrize(("epsilon", "ok"), [(5000.0, True), (3000.0, False)])
def test_declared_noise_of_clients_is_held_against_what_they_sent(
    tmp_path: Path, epsilon: float, ok: bool
) -> None:
    app = App(model=task.Plain, witnessed=True, mods=[LocalDpMod(0.1, 0.1, 5000.0, 1e-5)])
    declared = {"name": "local_dp", "clip": 0.1, "epsilon": epsilon, "delta": 1e-5}
    app.run(captured(app, tmp_path / "mine", defenses=[declared]), 2)
    run = fedsim.audit(tmp_path / "mine", attacks=[{"name": "prior_only"}])
    assert canary_of(run)["ok"] is ok, canary_of(run)


def end_sessions(strategy: Strategy) -> None:
    """A capture inside of a wrapper is not told that the run is over, but by the process's end."""
    for one in within(strategy):
        session = vars(one).get("_session")
        if session is not None:
            session.end()

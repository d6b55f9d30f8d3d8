"""The Flower ClientApp: receive weights, learn locally, upload an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.clients.dealing import open_holding
from fedsim.clients.shards import Drawn, Holding, draw_batches, simulated_holding
from fedsim.clients.shown import shown
from fedsim.core import wire
from fedsim.core.coin import coin_of, drawn_secret, training_seed
from fedsim.core.defense import Defense
from fedsim.core.device import resolve_device, threads
from fedsim.core.errors import DamagedError, VaultError
from fedsim.core.files import read_json, write_json
from fedsim.core.guard import Scene
from fedsim.core.keyring import Key
from fedsim.core.learning import Protocol, Trail, Update, batchnorm_buffers, learn, recall
from fedsim.core.losses import balanced_weights, dominant
from fedsim.core.models import build_architecture
from fedsim.core.observation import update_checksum
from fedsim.core.run import notice_path
from fedsim.core.seeds import seed_from
from fedsim.core.spec import Spec
from fedsim.core.vault import Truth, Vault
from fedsim.defenses.applied import declared, prepared
from fedsim.defenses.guards import create_guards
from fedsim.defenses.guards.watch import guarded_before, inspected


@dataclass(frozen=True)
class ClientSide:
    """What a client has of its own: how it trains and defends itself, its vault, and the folder
    that was dealt to it; without one it takes its share of the spec's data set.

    This one is simulated: its batches and its secrets come from the spec's seed, so that a run can
    be repeated, and the ``key`` of its vault is handed to it.
    """

    spec: Spec
    vault: Path
    data: Path | None = None
    key: Key | None = None

    def opened(self) -> Vault:
        """The client's vault."""
        return Vault(self.vault, self.key)

    def secret(self, round_: int, client: int) -> int:
        """What the client's defenses draw by in a round; it stays on the client's side."""
        return seed_from(f"client {client} round {round_} seed {self.spec.seed}")

    def drawn(self, round_: int, client: int, holding: Holding, secret: int) -> list[Drawn]:
        """The batches of a round."""
        return draw_batches(self.spec, round_, client, holding)

    def post(self, round_: int, client: int, digest: str) -> None:
        """Tell the other clients the digest of what this one is going to be sent. Simulated clients
        have a board for that, which no server writes to."""
        write_json(notice_path(self.vault, round_, client), {"digest": digest})

    def notices(self, round_: int) -> dict[int, str] | None:
        """What the clients of a round say that they receive; None where they cannot talk."""
        return {
            client: _notice(notice_path(self.vault, round_, client))
            for client in self.spec.cohort(round_)
        }

    def holding(self, client: int) -> Holding:
        if self.data is None:
            return simulated_holding(self.spec, client)
        return open_holding(self.data, self.spec, client)


@dataclass(frozen=True)
class DeployedSide(ClientSide):
    """A client on a machine of its own, whose server holds the spec and its seed: it draws its
    secret there, and its batches by it, and makes the key of its vault itself, in ``keys``."""

    keys: Path | None = None

    def opened(self) -> Vault:
        return Vault(self.vault, self.key, [self.keys] if self.keys else None)

    def post(self, round_: int, client: int, digest: str) -> None:
        """There is no board between machines: somebody would have to run one whom all trust."""

    def notices(self, round_: int) -> dict[int, str] | None:
        return None

    def secret(self, round_: int, client: int) -> int:
        return drawn_secret()

    def drawn(self, round_: int, client: int, holding: Holding, secret: int) -> list[Drawn]:
        return draw_batches(self.spec, round_, client, holding, secret)


def make_client_app(side_of: Callable[[Context], ClientSide]) -> ClientApp:
    """A ClientApp whose clients find their own side through ``side_of``."""
    app = ClientApp()

    @app.query()
    def who(message: Message, context: Context) -> Message:
        client = wire.client_of(context)
        if (announced := wire.announced_digest(message)) is not None:
            round_, digest_ = announced
            side_of(context).post(round_, client, digest_)
        return Message(wire.introduction(client), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with threads(1):
            reply = _or_fault(lambda: _replied(_trained_by(message, context, side_of)))
        return Message(reply, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        share = wire.share_of(message)
        with threads(1):
            reply = _or_fault(
                lambda: wire.evaluated(evaluate_client(*_asked(message, context, side_of), share))
            )
        return Message(reply, reply_to=message)

    return app


def _asked(
    message: Message, context: Context, side_of: Callable[[Context], ClientSide]
) -> tuple[ClientSide, int, int, dict[str, Tensor]]:
    """The side that is asked, the round, the client's number, and the weights it was sent."""
    side, client = side_of(context), wire.client_of(context)
    return side, wire.round_of(message), client, wire.weights_of(message)


def _or_fault(answer: Callable[[], RecordDict]) -> RecordDict:
    """The answer, or that the vault failed, which is the testbed's fault and not the client's."""
    try:
        return answer()
    except VaultError as error:
        return wire.fault(str(error))


def _replied(outcome: Update | Refused) -> RecordDict:
    return wire.upload(outcome) if isinstance(outcome, Update) else wire.refusal(outcome.words)


class Refused(NamedTuple):
    """A client's guards kept it from uploading; why."""

    words: str


def _trained_by(
    message: Message, context: Context, side_of: Callable[[Context], ClientSide]
) -> Update | Refused:
    asked, proximal = _asked(message, context, side_of), wire.proximal_of(message)
    return train_client(*asked, proximal=proximal) if proximal else train_client(*asked)


def train_client(
    side: ClientSide,
    round_: int,
    client: int,
    weights: dict[str, Tensor],
    *,
    proximal: float = 0.0,
) -> Update | Refused:
    """One client's work in one round; what it learned from goes into its vault, and so does what
    its guards found. ``proximal`` is what the strategy asks for in its message (FedProx)."""
    spec, vault = side.spec, side.opened()
    device = resolve_device(spec.engine.device)
    cohort = spec.cohort(round_)
    stored = vault.read_state(round_, client)
    defenses = [
        defense.at_round(round_, client, cohort)
        for defense in recall(declared(spec.defenses), stored)
    ]
    trail = Trail()
    holding = side.holding(client)
    model = _model(spec, holding, stored, weights, defenses, trail).to(device)
    secret = side.secret(round_, client)
    protocol = replace(Protocol.of(spec.train, spec.data, round_), proximal=proximal)
    classes = len(holding.own.classes)
    seen = shown(side.drawn(round_, client, holding, secret), protocol.augment, classes, secret)
    batches = [(pictures.to(device), targets.to(device)) for pictures, targets in seen.batches]
    weights_of_classes = _balance(protocol, holding, classes)
    protocol = replace(protocol, loss=protocol.loss.balanced_by(weights_of_classes))
    truth = Truth(
        **seen.of_truth(),
        defense_seed=secret,
        trail=trail.entries,
        class_weights=weights_of_classes,
    )
    watch = inspected(
        create_guards(spec.guards),
        Scene(
            *(round_, client, model, [(images, dominant(labels)) for images, labels in batches]),
            *(protocol, guarded_before(stored), side.notices(round_)),
        )
        if spec.guards
        else None,
    )
    if watch.refusal is not None:
        vault.write(round_, client, replace(truth, findings=watch.plain()))
        return Refused(watch.refusal)
    update = learn(
        model,
        batches,
        protocol,
        defenses=defenses,
        rng=coin_of(secret),
        seed=training_seed(secret),
        trail=trail,
    )
    state = trail.kept_back | watch.kept
    if spec.train.batchnorm == "local":
        state = state | batchnorm_buffers(model)
    sent = update_checksum(update)
    truth = replace(truth, trail=trail.entries, update=sent, findings=watch.plain())
    vault.write(round_, client, truth, state)
    return update


def _balance(protocol: Protocol, holding: Holding, classes: int) -> tuple[float, ...]:
    """The weights of the classes by this client's own samples, where the loss asks for them."""
    if protocol.loss.weights != "balanced":
        return ()
    labels = torch.as_tensor(holding.own.labels, dtype=torch.long)
    return balanced_weights(torch.bincount(labels, minlength=classes))


def _notice(path: Path) -> str:
    """What a client posted; nothing, where it did not."""
    try:
        return str(read_json(path)["digest"])
    except (FileNotFoundError, DamagedError, KeyError, TypeError):
        return ""


def evaluate_client(
    side: ClientSide,
    round_: int,
    client: int,
    weights: dict[str, Tensor],
    share: wire.Share,
) -> wire.Evaluation:
    """Loss and accuracy on the client's share of the test set."""
    spec = side.spec
    device = resolve_device(spec.engine.device)
    defenses = declared(spec.defenses)
    stored = side.opened().read_state(round_ + 1, client)
    holding = side.holding(client)
    model = _model(spec, holding, stored, weights, defenses, Trail()).to(device).eval()
    protocol = Protocol.of(spec.train, spec.data)
    images = holding.test()
    rows = range(share.part, len(images), share.parts)
    loss, right = 0.0, 0
    with torch.no_grad():
        for at in range(0, len(rows), 64):
            chosen = rows[at : at + 64]
            pictures = torch.stack([images.image(row) for row in chosen]).to(device)
            labels = torch.tensor(images.labels[list(chosen)], device=device)
            logits = model(protocol.normalise(pictures))
            loss += float(F.cross_entropy(logits, labels, reduction="sum"))
            right += int((logits.argmax(1) == labels).sum())
    count = max(1, len(rows))
    return wire.Evaluation(len(rows), loss / count, right / count)


def _model(
    spec: Spec,
    holding: Holding,
    stored: dict[str, Tensor],
    weights: dict[str, Tensor],
    defenses: list[Defense],
    trail: Trail,
) -> nn.Module:
    """The model as this client uses it: the server's weights, its own BatchNorm statistics."""
    model = build_architecture(
        spec.model, image_size=spec.data.image_size, num_classes=len(holding.own.classes)
    )
    for defense in defenses:
        before = _trained(model)
        model = prepared(model, [defense])
        trail.note(defense, "model", before, _trained(model))
    model = prepared(model, [], spec.train)
    model.load_state_dict(weights)
    if spec.train.batchnorm == "local":
        model.load_state_dict(stored, strict=False)
    return model


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """What is trained, as a payload whose digest changes with its names and shapes."""
    return {n: torch.tensor(p.shape) for n, p in model.named_parameters() if p.requires_grad}

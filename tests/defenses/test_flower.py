"""Our defenses beside Flower's own: the same update through both."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.message_type import MessageType
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.common import Parameters, bytes_to_ndarray, ndarrays_to_parameters
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    factor_extract,
    get_parameters_shape,
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.quantization import dequantize
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.supercore.differential_privacy import (
    KEY_CLIPPING_NORM,
    KEY_NORM_BIT,
    clip_inputs_inplace,
    get_norm,
)
from torch import Tensor, nn

from fedsim.core.learning import Protocol, Update, local_update
from fedsim.core.spec import Component, Upload
from fedsim.defenses import create_defense, create_defenses
from fedsim.federation.grids import InlineGrid
from fedsim.scoring.canary import CANARY_TOLERANCE, relative_error
from tests.defenses.conftest import BATCH, secret

DELTA = Protocol(upload=Upload.DELTA, lr=0.5)


@pytest.fixture
def update(vit) -> Update:
    """The weight delta of one step."""
    return local_update(vit, BATCH, DELTA)


def through(mod: Callable, sent: dict[str, Tensor], after: dict[str, Tensor], norm: float = 1.0):
    """What a Flower client with this mod uploads that was sent some weights and ends with others:
    its reply, and the difference as the server sees it."""
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": ArrayRecord(after), "metrics": metrics})
        return Message(content=content, reply_to=message)

    config = ConfigRecord({KEY_CLIPPING_NORM: norm})
    content = RecordDict({"arrays": ArrayRecord(sent), "config": config})
    grid = InlineGrid(app, 1)
    node = next(iter(grid.get_node_ids()))
    message = Message(content=content, message_type=MessageType.TRAIN, dst_node_id=node)
    (reply,) = grid.send_and_receive([message])
    assert not reply.has_error(), reply.error
    received = reply.content["arrays"].to_torch_state_dict()
    return reply, {name: received[name] - sent[name] for name in sent}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def size(tensors: dict[str, Tensor]) -> float:
    return float(torch.cat([t.flatten() for t in tensors.values()]).double().norm())


@pytest.mark.parametrize("share", [0.1, 0.9, 3.0])
def test_clipping_is_flowers_to_the_precision_of_a_float(update: Update, share: float) -> None:
    norm = share * size(update.tensors)
    flowers = {name: tensor.numpy().copy() for name, tensor in update.tensors.items()}
    clip_inputs_inplace(list(flowers.values()), norm)
    ours = create_defense("clipping", norm=norm).protect_update(update, secret()).tensors
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor.numpy(), flowers[name], rtol=2e-6)


@pytest.mark.parametrize("mod", [fixedclipping_mod, adaptiveclipping_mod])
def test_the_clipping_mods_clip_the_difference_of_weights(vit, update: Update, mod) -> None:
    sent, norm = weights(vit), 0.25 * size(update.tensors)
    after = {name: sent[name] + delta for name, delta in update.tensors.items()}
    reply, seen = through(mod, sent, after, norm)
    ours = create_defense("clipping", norm=norm).protect_update(update, secret()).tensors
    for name, tensor in ours.items():  # weights of up to 1 travel, so a difference has 1e-7
        torch.testing.assert_close(seen[name], tensor, rtol=1e-6, atol=2e-7)
    if mod is adaptiveclipping_mod:  # and whether it had to be clipped, in the clear
        assert reply.content["metrics"][KEY_NORM_BIT] == 1


def test_the_mods_count_every_array_that_travels_also_counters_of_batchnorm() -> None:
    """Ours clips what is trained. Flower's norm has the moves of BatchNorm's buffers in it, and
    how many batches were counted; what has no dimension is not clipped. `everything` is that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 5, 4), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(196, 5))
    sent = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    coin = torch.Generator().manual_seed(0)
    batches = [(torch.rand(2, 3, 32, 32, generator=coin), torch.tensor([1, 3])) for _ in range(5)]
    norm, protocol = 0.5, replace(DELTA, lr=0.01)
    plain = local_update(model, batches, protocol)
    after = {n: sent[n] + t for n, t in plain.tensors.items()} | plain.buffers
    _, seen = through(fixedclipping_mod, sent, {n: after[n] for n in sent}, norm)
    whole = get_norm([(after[name] - sent[name]).numpy() for name in sent])
    assert whole > 5 > size(plain.tensors)  # the counter of five batches is most of it
    assert int(seen["1.num_batches_tracked"]) == 5

    observed = replace(
        plain,
        tensors={name: seen[name] for name in plain.tensors},
        buffers={name: sent[name] + seen[name] for name in plain.buffers},
    )
    ours = create_defense("clipping", norm=norm, everything=True)
    parted = create_defense("clipping", norm=norm)
    for defense, low, high in ((ours, 0, CANARY_TOLERANCE), (parted, 0.5, 100)):
        replay = local_update(model, batches, protocol, defenses=[defense])
        travelled = {name: (sent[name] + t) - sent[name] for name, t in replay.tensors.items()}
        assert low <= relative_error(replace(replay, tensors=travelled), observed) < high


def test_local_dp_adds_the_noise_of_flowers_mod_to_the_same_clipped_update(
    vit, update: Update
) -> None:
    told = {"epsilon": 3.0, "delta": 1e-4, "sensitivity": 0.7}
    ours = create_defense("local_dp", clip=0.5, **told)
    assert ours.deviation == pytest.approx(0.7 * math.sqrt(2 * math.log(1.25 / 1e-4)) / 3.0)
    sent = weights(vit)
    after = {name: sent[name] + delta for name, delta in update.tensors.items()}
    np.random.seed(0)
    _, seen = through(LocalDpMod(0.5, 0.7, 3.0, 1e-4), sent, after)
    clipped = create_defense("clipping", norm=0.5).protect_update(update, secret()).tensors
    noisy = ours.protect_update(update, secret()).tensors
    for numbers in (seen, noisy):
        noise = torch.cat([(numbers[name] - clipped[name]).flatten() for name in clipped])
        assert len(noise) > 100_000  # so that the deviation is known to 0.3 % and the mean too
        assert float(noise.std()) == pytest.approx(ours.deviation, rel=0.01)
        assert abs(float(noise.mean())) < 0.01 * ours.deviation


def test_flowers_local_dp_leaves_what_has_no_dimension_as_it_is() -> None:
    """A temperature of one number, say, goes out in the clear; ours noises it."""
    sent = {"scale": torch.tensor(1.0), "weight": torch.zeros(1000)}
    after = {"scale": torch.tensor(1.25), "weight": torch.zeros(1000)}
    _, seen = through(LocalDpMod(0.1, 1.0, 1.0, 1e-5), sent, after)
    assert float(seen["scale"]) == 0.25
    assert float(seen["weight"].std()) > 1
    moved = Update(Upload.DELTA, {name: after[name] - sent[name] for name in sent})
    ours = create_defense("local_dp", clip=0.1, epsilon=1.0).protect_update(moved, secret())
    assert float(ours.tensors["scale"]) != 0.25


# -- secure aggregation -------------------------------------------------------------------------

# The package shows the function of this name in the module's place.
flowers_mod = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
RANGE, LEVELS, MODULUS, MOST = 8.0, 2**22, 2**32, 1000.0  # Flower's own


class Node(flowers_mod.SecAggPlusState):
    """One client of Flower's SecAgg+, as its mod keeps it."""

    def __init__(self, nid: int, cohort: int) -> None:
        super().__init__()
        self.nid = nid
        told = {Key.SAMPLE_NUMBER: cohort, Key.SHARE_NUMBER: cohort, Key.THRESHOLD: 2}
        told |= {Key.CLIPPING_RANGE: RANGE, Key.TARGET_RANGE: LEVELS, Key.MOD_RANGE: MODULUS}
        keys = flowers_mod._setup(self, ConfigRecord({**told, Key.MAX_WEIGHT: MOST}))
        self.shown = (keys[Key.PUBLIC_KEY_1], keys[Key.PUBLIC_KEY_2])


def masked_by_flower(uploads: dict[int, list[np.ndarray]], examples: int) -> tuple[list, dict]:
    """The nodes after the protocol's rounds of keys, and what each of them uploads."""
    nodes = {nid: Node(nid, len(uploads)) for nid in uploads}
    keys = ConfigRecord({str(nid): list(node.shown) for nid, node in nodes.items()})
    boxes: dict[int, list[tuple[int, bytes]]] = {nid: [] for nid in nodes}
    for nid, node in nodes.items():
        shares = flowers_mod._share_keys(node, keys)
        pairs = zip(shares[Key.DESTINATION_LIST], shares[Key.CIPHERTEXT_LIST], strict=True)
        for to, box in pairs:
            boxes[to].append((nid, box))
    masked = {}
    for nid, node in nodes.items():
        parcel = {
            Key.SOURCE_LIST: [source for source, _ in boxes[nid]],
            Key.CIPHERTEXT_LIST: [box for _, box in boxes[nid]],
        }
        parameters: Parameters = ndarrays_to_parameters(uploads[nid])
        answer = flowers_mod._collect_masked_vectors(
            node, ConfigRecord(parcel), examples, parameters
        )
        masked[nid] = [bytes_to_ndarray(one) for one in answer[Key.MASKED_PARAMETERS]]
    return list(nodes.values()), masked


def revealed_by_flower(nodes: list[Node], masked: dict[int, list[np.ndarray]]) -> list[np.ndarray]:
    """The mean that Flower's server makes of them, once all have handed in their own masks."""
    uploads = list(masked.values())
    total = uploads[0]
    for one in uploads[1:]:
        total = parameters_addition(total, one)
    for node in nodes:
        mask = pseudo_rand_gen(node.rd_seed, MODULUS, get_parameters_shape(total))
        total = parameters_subtraction(total, mask)
    weight, levels = factor_extract(parameters_mod(total, MODULUS))
    numbers = dequantize(levels, RANGE, LEVELS)
    return [(n - (len(nodes) - 1) * RANGE) * LEVELS / weight for n in numbers]


def test_the_sum_that_secure_aggregation_reveals_is_flowers_to_its_quantisation(vit) -> None:
    cohort, sent, examples = [3, 5, 8], weights(vit), 500
    deltas = {}
    for client in cohort:
        coin = torch.Generator().manual_seed(client)
        batch = [(torch.rand(1, 3, 32, 32, generator=coin), torch.tensor([client % 5]))]
        deltas[client] = local_update(vit, batch, DELTA)
    np.random.seed(0)  # Flower rounds by chance
    uploads = {c: [(sent[n] + deltas[c].tensors[n]).numpy() for n in sent] for c in cohort}
    nodes, masked = masked_by_flower(uploads, examples)
    theirs = revealed_by_flower(nodes, masked)

    defense = create_defense("secure_aggregation")
    hidden = [
        defense.at_round(1, c, cohort).protect_update(deltas[c], secret()).tensors for c in cohort
    ]
    total = {name: sum(one[name] for one in hidden) for name in sent}
    ours = defense.reveal(total, 1, cohort, cohort)

    # Flower rounds weights times their share of `max_weight` up or down to a step, each client's.
    step = 2 * RANGE / LEVELS * MOST / examples
    apart = [
        np.abs(mean - (sent[name] + ours[name] / 3).numpy()).max()
        for name, mean in zip(sent, theirs, strict=True)
    ]
    assert 0.05 * step < max(apart) <= step * 1.01
    # Ours rounds the update itself, to 2^-24 a client.
    exact = {n: sum(deltas[c].tensors[n].double() for c in cohort) for n in sent}
    worst = max(float((ours[n].double() - exact[n]).abs().max()) for n in sent)
    assert worst < 3 * 2.0**-24
    assert step > 50 * worst


def test_one_upload_of_flowers_secure_aggregation_is_noise(vit) -> None:
    sent = [tensor.numpy() for tensor in weights(vit).values()]
    _, masked = masked_by_flower({1: sent, 2: sent}, 500)
    plain = np.concatenate([one.ravel() for one in sent])
    for upload in masked.values():
        flat = np.concatenate([one.ravel() for one in upload[1:]]).astype(float)
        assert abs(np.corrcoef(flat, plain)[0, 1]) < 0.02
        assert flat.std() == pytest.approx(MODULUS / 12**0.5, rel=0.02)


def test_a_mask_of_flowers_has_a_seed_of_32_bits() -> None:
    """However long the key that two clients agreed on: its words are folded into one."""
    word, nothing = (7).to_bytes(4, "little"), bytes(28)
    first, other = (pseudo_rand_gen(s, MODULUS, [(4,)]) for s in (word + nothing, nothing + word))
    assert np.array_equal(first[0], other[0])


# -- the canary ---------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.5, 0.01])
def test_a_declared_clipping_makes_the_canary_hold_on_an_update_that_flower_clipped(
    vit, update: Update, share: float
) -> None:
    sent, norm = weights(vit), share * size(update.tensors)
    after = {name: sent[name] + delta for name, delta in update.tensors.items()}
    _, seen = through(fixedclipping_mod, sent, after, norm)
    observed = replace(update, tensors=seen)

    def canary(*defenses: dict) -> float:
        declared = create_defenses([Component(**one) for one in defenses])
        replay = local_update(vit, BATCH, DELTA, defenses=declared)
        # What travels is weights: the difference from those that were sent has their rounding.
        travelled = {name: (sent[name] + t) - sent[name] for name, t in replay.tensors.items()}
        return relative_error(replace(replay, tensors=travelled), observed)

    assert canary({"name": "clipping", "norm": norm}) < CANARY_TOLERANCE
    assert canary() > 0.9
    assert canary({"name": "clipping", "norm": 1.1 * norm}) > 0.05

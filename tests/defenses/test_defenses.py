"""The defenses: what they change, that it is on record, and that the seed makes it repeat."""

from __future__ import annotations

import math

import pytest
import torch
import yaml

from fedsim.clients.shards import draw_batches
from fedsim.core.errors import ModelError, SpecError
from fedsim.core.learning import Protocol, Trail, digest, learn, local_update, recall
from fedsim.core.models import build_model
from fedsim.core.spec import Component, ModelSpec, load_spec
from fedsim.defenses import DEFENSES, create_defense, create_defenses
from fedsim.scoring.budgets import budgets

BATCH = [(torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([1]))]


@pytest.fixture
def vit():
    spec = ModelSpec(options={"patch_size": 8, "depth": 2, "embed_dim": 96})
    return build_model(spec, image_size=32, num_classes=5, seed=0)


def secret(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("relative", [False, True])
def test_gaussian_noise_has_the_strength_it_says(vit, relative: bool) -> None:
    noise = create_defense("gaussian_noise", std=0.01, relative=relative)
    plain = local_update(vit, BATCH, Protocol())
    noisy = local_update(vit, BATCH, Protocol(), defenses=[noise], rng=secret())
    for name in ("blocks.0.mlp.fc1.weight", "patch_embed.proj.weight"):
        difference = noisy.tensors[name] - plain.tensors[name]
        scale = plain.tensors[name].square().mean().sqrt() if relative else 1.0
        assert float(difference.std()) == pytest.approx(float(0.01 * scale), rel=0.05)


def test_the_clients_seed_repeats_the_noise(vit) -> None:
    noise = create_defense("gaussian_noise")
    first, same, other = (
        digest(local_update(vit, BATCH, Protocol(), defenses=[noise], rng=secret(s)).tensors)
        for s in (1, 1, 2)
    )
    assert first == same != other


def test_a_frozen_position_embedding_is_not_uploaded(vit) -> None:
    protected = create_defense("frozen_pe").prepare_model(vit)
    update = local_update(protected, BATCH, Protocol())
    assert "pos_embed" not in update.tensors
    assert "patch_embed.proj.weight" in update.tensors


def test_frozen_pe_refuses_a_model_without_one() -> None:
    resnet = build_model(ModelSpec(name="resnet10t"), image_size=32, num_classes=5, seed=0)
    with pytest.raises(ModelError):
        create_defense("frozen_pe").prepare_model(resnet)


def test_a_defense_proves_that_it_changed_the_payload(vit) -> None:
    trail = Trail()
    noise = create_defense("gaussian_noise", std=0.1)
    update = learn(vit, BATCH, Protocol(), defenses=[noise], rng=secret(), trail=trail)
    assert [(e["defense"], e["stage"]) for e in trail.entries] == [("GaussianNoise", "update")]
    assert trail.entries[0]["after"] == digest(update.tensors) != trail.entries[0]["before"]


def test_a_defense_that_does_nothing_leaves_no_proof(vit) -> None:
    trail = Trail()
    learn(vit, BATCH, Protocol(), defenses=[create_defense("gaussian_noise", std=0.0)], trail=trail)
    assert trail.entries == []


def test_bad_defenses_are_one_sentence() -> None:
    with pytest.raises(SpecError, match="did you mean 'gaussian_noise'"):
        create_defense("gausian_noise")
    with pytest.raises(SpecError, match="std"):
        create_defense("gaussian_noise", std=-1)
    twice = [Component(name="frozen_pe"), Component(name="frozen_pe")]
    with pytest.raises(SpecError, match="twice"):
        create_defenses(twice)


def upload(vit, defense, batch=BATCH, seed: int = 0):
    return local_update(vit, batch, Protocol(), defenses=[defense], rng=secret(seed))


def test_laplace_noise_has_the_strength_and_the_tails_it_says(vit) -> None:
    noise = create_defense("laplace_noise", std=0.01)
    plain, noisy = local_update(vit, BATCH, Protocol()), upload(vit, noise)
    name = "blocks.0.mlp.fc1.weight"
    apart = noisy.tensors[name] - plain.tensors[name]
    assert float(apart.std()) == pytest.approx(0.01, rel=0.05)
    assert float(apart.abs().mean()) == pytest.approx(0.01 / 2**0.5, rel=0.05)  # Gauss: .8


@pytest.mark.parametrize("name", ["top_k", "random_k"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.99])
def test_sparsification_keeps_exactly_k_a_layer(vit, name: str, sparsity: float) -> None:
    plain, sparse = (
        local_update(vit, BATCH, Protocol()),
        upload(vit, create_defense(name, sparsity=sparsity)),
    )
    for layer, tensor in sparse.tensors.items():
        wanted = max(1, round((1 - sparsity) * tensor.numel()))
        present = tensor != 0
        assert int(present.sum()) <= wanted
        if int((plain.tensors[layer] != 0).sum()) == tensor.numel():
            assert int(present.sum()) == wanted
        assert torch.equal(tensor[present], plain.tensors[layer][present])
        if name == "top_k" and 0 < int(present.sum()) < tensor.numel():
            left_out = plain.tensors[layer][~present].abs().max()
            assert float(left_out) <= float(tensor[present].abs().min())


def test_quantization_has_as_many_levels_as_it_says(vit) -> None:
    plain = local_update(vit, BATCH, Protocol()).tensors["blocks.0.mlp.fc1.weight"]
    eight = upload(vit, create_defense("quantization")).tensors["blocks.0.mlp.fc1.weight"]
    one = upload(vit, create_defense("quantization", kind="sign"))
    assert len(eight.unique()) <= 255
    assert float((eight - plain).abs().max()) <= float(plain.abs().max()) / 254 + 1e-9
    assert len(one.tensors["blocks.0.mlp.fc1.weight"].abs().unique()) == 1


def test_clipping_bounds_the_norm_and_keeps_the_direction(vit) -> None:
    plain = local_update(vit, BATCH, Protocol()).tensors
    size = torch.cat([t.flatten() for t in plain.values()]).norm()
    for norm in (0.1 * float(size), 10 * float(size)):
        held = upload(vit, create_defense("clipping", norm=norm)).tensors
        flat = torch.cat([t.flatten() for t in held.values()])
        assert float(flat.norm()) == pytest.approx(min(norm, float(size)), rel=1e-4)
    scaled = {n: t * (flat.norm() / size) for n, t in plain.items()}
    assert all(torch.allclose(held[n], scaled[n], rtol=1e-4) for n in plain)


def test_what_is_withheld_is_not_uploaded(vit) -> None:
    parts = ["position", "patches", "cls", "head"]
    net = create_defense("withheld", parts=parts).prepare_model(vit)
    held = local_update(net, BATCH, Protocol()).tensors
    gone = {"pos_embed", "patch_embed.proj.weight", "cls_token", "head.weight", "head.bias"}
    assert not gone & held.keys()
    assert "blocks.0.attn.qkv.weight" in held
    resnet = build_model(ModelSpec(name="resnet10t"), image_size=32, num_classes=5, seed=0)
    with pytest.raises(ModelError):
        create_defense("withheld").prepare_model(resnet)


def pictures(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    coin = torch.Generator().manual_seed(1)
    labels = torch.arange(count) % 5
    return [(torch.rand(count, 3, 32, 32, generator=coin), labels)]


def test_dp_sgd_is_the_plain_gradient_where_nothing_is_clipped_or_added(vit) -> None:
    batch = pictures(20)  # more than are held at once
    plain = local_update(vit, batch, Protocol()).tensors
    loose = upload(vit, create_defense("dp_sgd", clip=1e6, noise=0.0), batch).tensors
    for name in plain:
        assert torch.allclose(plain[name], loose[name], atol=1e-5)


def test_dp_sgd_clips_every_sample_and_adds_the_noise_it_says(vit) -> None:
    batch = pictures(4)
    clip = 0.01
    exact = upload(vit, create_defense("dp_sgd", clip=clip, noise=0.0), batch).tensors
    by_hand: dict[str, torch.Tensor] = {}
    for image, label in zip(*batch[0], strict=True):
        own = local_update(vit, [(image[None], label[None])], Protocol()).tensors
        norm = torch.cat([t.flatten() for t in own.values()]).norm()
        for name, tensor in own.items():
            by_hand[name] = by_hand.get(name, 0) + tensor * min(1.0, clip / float(norm)) / 4
    assert all(torch.allclose(exact[n], by_hand[n], atol=1e-6) for n in exact)
    noisy = upload(vit, create_defense("dp_sgd", clip=clip, noise=2.0), batch).tensors
    apart = torch.cat([(noisy[n] - exact[n]).flatten() for n in exact])
    assert float(apart.std()) == pytest.approx(2.0 * clip / 4, rel=0.02)


def test_dp_sgd_counts_its_budget_as_opacus_does() -> None:
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    for _ in range(50):
        accountant.step(noise_multiplier=1.1, sample_rate=0.05)
    defense = create_defense("dp_sgd", noise=1.1)
    assert defense.epsilon(0.05, 50) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    assert defense.epsilon(0.05, 100) > defense.epsilon(0.05, 50)
    assert create_defense("dp_sgd", noise=0.0).epsilon(0.05, 1) == float("inf")


def test_dp_sgd_refuses_batchnorm() -> None:
    resnet = build_model(ModelSpec(name="resnet10t"), image_size=32, num_classes=5, seed=0)
    with pytest.raises(ModelError, match=r"BatchNorm.*GroupNorm"):
        create_defense("dp_sgd").prepare_model(resnet)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("top_k", {"sparsity": 1.0}),
        ("random_k", {"sparsity": -0.1}),
        ("laplace_noise", {"std": -1}),
        ("clipping", {"norm": 0}),
        ("dp_sgd", {"noise": -1}),
        ("mjp", {"ratio": 0}),
        ("quantization", {"kind": "int3"}),
        ("withheld", {"parts": ["everything"]}),
    ],
)
def test_a_strength_out_of_range_is_one_sentence(name: str, params: dict) -> None:
    with pytest.raises(SpecError, match=next(iter(params))):
        create_defense(name, **params)


def test_noise_after_a_sparsification_leaves_its_zeros(vit) -> None:
    both = [
        create_defense("top_k", sparsity=0.9),
        create_defense("gaussian_noise", std=1.0, relative=True, sparse=True),
    ]
    sparse, noisy = (
        local_update(vit, BATCH, Protocol(), defenses=both[:n], rng=secret()).tensors
        for n in (1, 2)
    )
    for name in sparse:
        assert torch.equal(sparse[name] == 0, noisy[name] == 0)
    name = "blocks.0.mlp.fc1.weight"
    held = sparse[name] != 0
    apart = (noisy[name] - sparse[name])[held]
    assert float(apart.std()) == pytest.approx(
        float(sparse[name][held].square().mean().sqrt()), rel=0.1
    )


def test_noise_can_be_measured_by_the_whole_update(vit) -> None:
    plain = local_update(vit, BATCH, Protocol()).tensors
    noisy = upload(vit, create_defense("gaussian_noise", std=0.5, relative="update")).tensors
    whole = torch.cat([t.flatten() for t in plain.values()]).square().mean().sqrt()
    for name in ("blocks.0.mlp.fc1.weight", "patch_embed.proj.weight"):
        apart = noisy[name] - plain[name]
        assert float(apart.std()) == pytest.approx(0.5 * float(whole), rel=0.05)


def test_local_dp_clips_and_adds_the_noise_of_flowers_mod(vit) -> None:
    defense = create_defense("local_dp", clip=0.5, epsilon=3.0, delta=1e-4)
    assert defense.deviation == pytest.approx(0.5 * (2 * math.log(1.25 / 1e-4)) ** 0.5 / 3.0)
    clipped = upload(vit, create_defense("clipping", norm=0.5)).tensors
    noisy = upload(vit, defense).tensors
    apart = torch.cat([(noisy[n] - clipped[n]).flatten() for n in clipped])
    assert float(apart.std()) == pytest.approx(defense.deviation, rel=0.02)


def test_soteria_leaves_out_the_features_that_tell_most(vit) -> None:
    defense = create_defense("soteria", ratio=0.25, probes=400)
    plain, held = local_update(vit, BATCH, Protocol()).tensors, upload(vit, defense).tensors
    gone = (held["head.weight"] == 0).all(0)
    assert int(gone.sum()) == 24
    assert torch.allclose(held["head.weight"][:, ~gone], plain["head.weight"][:, ~gone])
    same = "blocks.0.attn.qkv.weight"
    assert torch.allclose(held[same], plain[same], atol=1e-6)
    x = Protocol().normalise(BATCH[0][0])

    def features(images):
        return vit.forward_head(vit.forward_features(images), pre_logits=True)

    jacobian = torch.autograd.functional.jacobian(features, x)[0].flatten(1)
    told = jacobian.norm(dim=1) / features(x)[0].abs()
    exact = set(told.topk(24).indices.tolist())
    assert len(exact & set(torch.nonzero(gone)[:, 0].tolist())) >= 21


def test_a_disguised_batch_has_fewer_labels_than_pictures() -> None:
    spec = load_spec({}, ["data={clients: 2}", "train={batch_size: 8, evaluate: false}"])
    hidden = load_spec(
        spec.model_dump(mode="json"), ["defenses=[{name: label_disguise, share: 0.25}]"]
    )
    for round_ in range(1, 6):
        ((rows, (_, labels)),) = draw_batches(hidden, round_, 0)
        assert len(labels.unique()) == 2
        assert len(rows) == 8
    ((_, (_, labels)),) = draw_batches(spec, 1, 0)
    assert len(labels.unique()) > 2


def uploads(vit, cohort: list[int]) -> tuple[dict, dict]:
    """What each client would upload in the clear, and what it uploads masked."""
    defense = create_defense("secure_aggregation")
    clear, masked = {}, {}
    for client in cohort:
        coin = torch.Generator().manual_seed(client)
        batch = [(torch.rand(1, 3, 32, 32, generator=coin), torch.tensor([client % 5]))]
        clear[client] = local_update(vit, batch, Protocol()).tensors
        acting = defense.at_round(4, client, cohort)
        masked[client] = local_update(vit, batch, Protocol(), defenses=[acting]).tensors
    return clear, masked


@pytest.mark.parametrize("stayed", [[2, 5, 9], [2, 9], [5]])
def test_masks_cancel_in_the_sum_also_when_clients_drop_out(vit, stayed: list[int]) -> None:
    cohort = [2, 5, 9]
    clear, masked = uploads(vit, cohort)
    for name in clear[2]:
        total = {name: sum(masked[client][name] for client in stayed)}
        defense = create_defense("secure_aggregation")
        found = defense.reveal(total, 4, cohort, stayed)[name]
        wanted = sum(clear[client][name].double() for client in stayed)
        assert float((found - wanted).abs().max()) <= len(stayed) * 2.0**-24


def test_a_masked_upload_alone_is_noise(vit) -> None:
    clear, masked = uploads(vit, [2, 5])
    name = "blocks.0.mlp.fc1.weight"
    held, plain = masked[2][name].double().flatten(), clear[2][name].double().flatten()
    assert masked[2][name].dtype == torch.int64
    assert abs(float(torch.corrcoef(torch.stack([held, plain]))[0, 1])) < 0.05
    assert float(held.std()) == pytest.approx(2.0**64 / 12**0.5, rel=0.05)  # uniform


def test_error_feedback_uploads_later_what_was_left_out(vit) -> None:
    """The sum of the uploads falls behind that of the updates by what the client still owes."""
    defense = create_defense("top_k", sparsity=0.9, feedback=True)
    state: dict[str, torch.Tensor] = {}
    plain = local_update(vit, BATCH, Protocol()).tensors
    sent: dict[str, torch.Tensor] = {}
    first = plain
    for round_ in range(3):
        trail = Trail()
        (own,) = recall([defense], state)
        update = learn(vit, BATCH, Protocol(), defenses=[own], trail=trail).tensors
        sent = {n: sent.get(n, 0) + t for n, t in update.items()}
        first = update if round_ == 0 else first
        state = trail.kept_back
    prefix = next(iter(state)).removesuffix(next(iter(plain)))
    for name, tensor in plain.items():
        assert torch.allclose(sent[name] + state[f"{prefix}{name}"], 3 * tensor, atol=1e-5)
    name = "blocks.0.mlp.fc1.weight"
    assert not torch.equal(update[name] != 0, first[name] != 0)  # others have had their turn


def test_without_feedback_nothing_is_kept_back(vit) -> None:
    trail = Trail()
    learn(vit, BATCH, Protocol(), defenses=[create_defense("top_k")], trail=trail)
    assert trail.kept_back == {}


def test_the_canary_knows_what_a_client_kept_back(tmp_path) -> None:
    from fedsim.audit.stages import audit
    from tests.conftest import small_spec

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
    from fedsim.audit.stages import conclude

    conclude(run)
    assert float(run.scores["canary"].max()) > 1e-2


def test_what_an_upload_takes_on_a_wire(vit) -> None:
    plain = local_update(vit, BATCH, Protocol())
    numbers = sum(t.numel() for t in plain.tensors.values())
    assert plain.nbytes() == 4 * numbers

    def size(name: str, **params) -> float:
        defense = create_defense(name, **params)
        return defense.encoded_bytes(upload(vit, defense)) / numbers

    assert size("top_k", sparsity=0.9) == pytest.approx(0.8, rel=0.02)  # a number and its place
    assert size("top_k", sparsity=0.1) == pytest.approx(4.0, rel=0.02)  # dense is shorter
    assert size("quantization") == pytest.approx(1.0, rel=0.01)
    assert size("quantization", kind="sign") == pytest.approx(1 / 8, rel=0.02)
    assert create_defense("clipping").encoded_bytes(plain) is None


def test_the_budget_counts_every_round_of_the_client_that_spends_most() -> None:
    def told(*overrides: str) -> dict:
        spec = load_spec({}, ["data.image_size=32", "data.clients=4", *overrides])
        (budget,) = budgets(spec)
        return budget

    noise = "defenses=[{name: dp_sgd, noise: 1.0}]"
    one = told(noise, "train={rounds: 1, batch_size: 8}")
    assert one["epsilon"] == pytest.approx(create_defense("dp_sgd").epsilon(8 / 128, 1))
    epochs = told(noise, "train={rounds: 2, batch_size: 8, upload: delta, local_epochs: 1}")
    assert epochs["epsilon"] == pytest.approx(create_defense("dp_sgd").epsilon(8 / 128, 32))
    assert told("defenses=[{name: dp_sgd, noise: 0.0}]")["epsilon"] is None
    local = "defenses=[{name: local_dp, epsilon: 0.9}]"
    rounds = [told(local, f"train={{rounds: {r}}}")["epsilon"] for r in (1, 4)]
    assert rounds[0] < 0.9 < rounds[1] < 4 * 0.9


def test_the_sum_of_a_cohort_is_the_gradient_of_its_joint_batch(vit) -> None:
    """What secure aggregation leaves to the server is one gradient of all the clients' pictures:
    as hard to invert as a larger batch, and no harder."""
    images, labels = pictures(6)[0]
    apart = [
        local_update(vit, [(images[i : i + 2], labels[i : i + 2])], Protocol()).tensors
        for i in (0, 2, 4)
    ]
    joint = local_update(vit, [(images, labels)], Protocol()).tensors
    for name, tensor in joint.items():
        mean = torch.stack([one[name] for one in apart]).mean(0)
        assert torch.allclose(mean, tensor, atol=1e-5)


MILD = {
    "mjp": {"ratio": 0.3},
    "gaussian_noise": {"std": 0.001, "relative": True},
    "laplace_noise": {"std": 0.001, "relative": True},
    "top_k": {"sparsity": 0.5},
    "random_k": {"sparsity": 0.5},
    "quantization": {"kind": "int8"},
    "clipping": {"norm": 1.0},
    "dp_sgd": {"noise": 0.01},
    "local_dp": {"epsilon": 5000},
    "frozen_pe": {},
    "sinusoidal_pe": {},
    "withheld": {"parts": ["position"]},
    "label_disguise": {},
    "soteria": {"ratio": 0.2},
    "secure_aggregation": {},
}


def test_every_defense_has_a_mild_strength() -> None:
    assert MILD.keys() == DEFENSES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", MILD)
def test_a_defense_lets_the_federation_learn_at_its_mild_strength(name: str, tmp_path) -> None:
    """The default data and a small ViT: eight classes, 128 test pictures, chance is one in eight;
    a model that guesses is above 22 % once in a thousand times."""
    from fedsim.audit.stages import federate

    own = yaml.safe_dump([{"name": name, **MILD[name]}], default_flow_style=True)
    spec = load_spec(
        {},
        [
            "data={name: photos, image_size: 32, clients: 8}",
            "model={name: vit_tiny_patch16_224, options: {patch_size: 8, depth: 2, embed_dim: 96}}",
            "train={rounds: 6, batch_size: 8, upload: delta, local_epochs: 1, lr: 0.03, "
            "momentum: 0.9}",
            f"defenses={own}",
            "engine={kind: inline, device: cpu}",
        ],
    )
    run = federate(spec, tmp_path / "run")
    assert float(run.rounds["test_accuracy"].iloc[-1]) > 0.22

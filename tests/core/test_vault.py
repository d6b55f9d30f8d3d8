"""The vault: for its owner alone, encrypted, and shut while an attack runs."""

from __future__ import annotations

import json
import shutil
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open

from fedsim.core.errors import ForeignTruthError, MissingKeyError, NotGranted, VaultError
from fedsim.core.files import save_tensors
from fedsim.core.keyring import VARIABLE
from fedsim.core.run import Run, address_of, list_observations, state_path, truth_path
from fedsim.core.seal import sealed
from fedsim.core.vault import Truth, Vault

STATE = {"bn.running_mean": torch.linspace(0, 1, 64)}


def some_truth(seed: int = 0) -> Truth:
    coin = torch.Generator().manual_seed(seed)
    images = torch.rand(2, 3, 8, 8, generator=coin)
    return Truth(images, torch.tensor([3, 5]), [[0], [1, 0]], 2**200 + seed, [])


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    vault = Vault(tmp_path / "vault")
    for client in range(2):
        vault.write(1, client, some_truth(client), STATE)
    return vault


def test_what_is_written_is_read(vault: Vault) -> None:
    for client in range(2):
        truth, expected = Vault(vault.root).read(1, client), some_truth(client)
        assert torch.equal(truth.images, expected.images)
        assert torch.equal(truth.labels, expected.labels)
        assert replace(truth, images=expected.images, labels=expected.labels) == replace(
            expected, stateful=True
        )
        state = Vault(vault.root).read_state(2, client)
        assert torch.equal(state["bn.running_mean"], STATE["bn.running_mean"])
        Vault(vault.root).check(1, client)


def augmented_truth() -> Truth:
    originals = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(9))
    views = torch.cat([originals.flip(3), originals])
    mixtures = torch.tensor([[0.7, 0.3], [0.2, 0.8], [1.0, 0.0], [0.4, 0.6]])
    return Truth(
        views, mixtures.argmax(1), [[0, 1], [2, 3]], 7, [],
        originals=originals, origins=[0, 1, 0, 1], mixtures=mixtures, class_weights=(0.5, 2.0),
    )  # fmt: skip


def test_what_the_model_saw_is_kept_beside_the_originals(vault: Vault) -> None:
    expected = augmented_truth()
    vault.write(2, 0, expected)
    truth = Vault(vault.root).read(2, 0)
    assert truth.originals is not None
    assert torch.equal(truth.originals, expected.sources[:2])
    assert torch.equal(truth.sources, expected.sources)
    assert truth.class_weights == (0.5, 2.0)
    assert [labels.tolist() for _, labels in truth.replay()] == [
        labels.tolist() for _, labels in expected.replay()
    ]
    assert truth.digest() != replace(truth, class_weights=()).digest()
    assert torch.equal(some_truth().sources, some_truth().images)


@pytest.mark.parametrize("origins", [[0, 1, 0], [0, 1, 0, 2], []])
def test_originals_that_are_of_other_images_are_damage(vault: Vault, origins: list[int]) -> None:
    vault.write(2, 0, replace(augmented_truth(), origins=origins))
    with pytest.raises(VaultError, match="its originals do not fit its images"):
        vault.read(2, 0)


def test_the_vault_is_for_its_owner_only(small_run: Run) -> None:
    assert stat.S_IMODE(small_run.vault.stat().st_mode) == 0o700
    files = [file for file in small_run.vault.rglob("*") if file.is_file()]
    assert len(files) == 5
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_plain_read_of_a_file_gives_nothing_away(vault: Vault) -> None:
    truth = some_truth(0)
    secrets = [
        truth.images.numpy().tobytes()[:16],
        truth.labels.numpy().tobytes(),
        STATE["bn.running_mean"].numpy().tobytes()[-16:],
        *(b"images", b"labels", b"batches", b"defense_seed", b"running_mean"),
    ]
    for path in (truth_path(vault.root, 1, 0), state_path(vault.root, 1, 0)):
        content = path.read_bytes()
        assert not [secret for secret in secrets if secret in content]
        with pytest.raises(SafetensorError), safe_open(path, framework="pt"):
            pass


def test_files_that_changed_places_do_not_open(vault: Vault) -> None:
    one, two = (truth_path(vault.root, 1, client) for client in range(2))
    held = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(held)
    for client in range(2):
        with pytest.raises(VaultError, match=r"is damaged, or .* its round is done again"):
            Vault(vault.root).read(1, client)
    shutil.copy(state_path(vault.root, 1, 0), one)
    with pytest.raises(VaultError, match="is damaged"):
        Vault(vault.root).read(1, 0)


def test_a_vault_that_is_not_encrypted_still_opens_and_is_written_under_a_key(
    tmp_path: Path,
) -> None:
    old, truth = Vault(tmp_path / "old"), some_truth()
    about = '{"batches": [[0], [1, 0]], "defense_seed": 7, "trail": [], "stateful": true}'
    content = {"images": truth.images, "labels": truth.labels}
    save_tensors(truth_path(old.root, 1, 0), content, {"about": about})
    save_tensors(state_path(old.root, 1, 0), STATE)
    old.keys.require()
    old.check(1, 0)
    assert torch.equal(old.read(1, 0).images, truth.images)
    old.write(2, 0, truth)
    for round_ in (1, 2):
        assert b"images" not in truth_path(old.root, round_, 0).read_bytes()
    assert torch.equal(Vault(old.root).read(2, 0).images, Vault(old.root).read(1, 0).images)


def test_a_vault_that_was_copied_without_its_key_says_which_it_wants(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = vault.keys.own().name
    key = next(folder / f"{name}.key" for folder in vault.keys.folders)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "another machine"))
    copy = shutil.copytree(vault.root, tmp_path / "copy")
    with pytest.raises(MissingKeyError, match=f"bring '{name}.key'") as caught:
        Vault(copy).read(1, 0)
    assert "\n" not in str(caught.value)
    (tmp_path / "another machine").mkdir()
    shutil.copy(key, tmp_path / "another machine")
    assert torch.equal(Vault(copy).read(1, 0).images, some_truth(0).images)


def test_what_another_vault_has_is_taken_under_its_own_key(vault: Vault, tmp_path: Path) -> None:
    names = [path.relative_to(vault.root).as_posix() for path in vault.root.rglob("*.safetensors")]
    damaged = truth_path(vault.root, 1, 1)
    damaged.write_bytes(damaged.read_bytes()[:-4])
    own = Vault(tmp_path / "own", folders=[tmp_path / "keys"])
    for name in names:
        own.take(vault, name)
    assert len(names) == 4
    alone = Vault(own.root, folders=[tmp_path / "keys"])
    assert torch.equal(alone.read(1, 0).images, some_truth(0).images)
    assert alone.read_state(2, 1).keys() == STATE.keys()
    with pytest.raises(VaultError, match="is damaged"):
        alone.read(1, 1)


def test_the_vault_does_not_open_while_an_attack_runs(small_run: Run, tmp_path: Path) -> None:
    round_, client = address_of(list_observations(small_run.observations)[0])
    opened = Vault(small_run.vault)
    truth = opened.read(round_, client)
    assert truth.images.shape == (1, 3, 32, 32)
    for ask in (
        lambda: opened.read(round_, client),
        lambda: opened.read_state(round_ + 1, client),
        lambda: opened.check(round_, client),
        lambda: opened.write(round_, client, truth),
        lambda: Vault(tmp_path / "copy").take(opened, f"round-{round_:04d}/client-{client:04d}"),
    ):
        with sealed(), pytest.raises(NotGranted, match="vault"):
            ask()


def test_nor_in_a_thread_that_the_attack_starts(small_run: Run) -> None:
    where = address_of(list_observations(small_run.observations)[0])
    found: list[object] = []

    def break_in() -> None:
        try:
            found.append(Vault(small_run.vault).read(*where))
        except Exception as error:
            found.append(error)

    for seal in (sealed, threading.Lock):
        with seal():  # the second is none: the same thread then opens it
            thread = threading.Thread(target=break_in)
            thread.start()
            thread.join()
    assert isinstance(found[0], NotGranted)
    assert isinstance(found[1], Truth)


def plain(root: Path, round_: int, client: int) -> None:
    """A truth and a state that say whose they are, and are not encrypted."""
    whose = {"round": round_, "client": client}
    about = {"batches": [[0]], "defense_seed": 0, "trail": [], "stateful": True, **whose}
    tensors = {"images": torch.zeros(1, 3, 8, 8), "labels": torch.tensor([3])}
    save_tensors(truth_path(root, round_, client), tensors, {"about": json.dumps(about)})
    state = state_path(root, round_, client)
    save_tensors(state, {"x": torch.ones(1)}, {"about": json.dumps(whose)})


def test_a_file_in_clear_is_not_taken_for_the_truth_of_a_vault_that_has_a_key(
    vault: Vault,
) -> None:
    plain(vault.root, 1, 0)
    for opened in (vault, Vault(vault.root), Vault(vault.root, vault.keys.own())):
        with pytest.raises(VaultError, match=r"lies in clear in a vault that is .* done again"):
            opened.read(1, 0)
        with pytest.raises(VaultError, match="lies in clear"):
            opened.read_state(2, 0)
        assert torch.equal(opened.read(1, 1).images, some_truth(1).images)


def test_an_image_that_no_batch_uses_is_not_among_what_a_client_learned_from(vault: Vault) -> None:
    truth = some_truth()
    decoyed = replace(
        truth,
        images=torch.cat([truth.images, torch.zeros(1, 3, 8, 8)]),
        labels=torch.tensor([3, 5, 0]),
    )
    vault.write(1, 0, decoyed)
    with pytest.raises(VaultError, match="it has images that no batch uses"):
        vault.read(1, 0)
    vault.write(1, 0, replace(decoyed, batches=[[0], [1, 0, 2]]))
    assert len(vault.read(1, 0).images) == 3


@pytest.mark.parametrize(
    ("moved", "there", "words"),
    [
        ((1, 1), (1, 0), "is of client 1 in round 1, not of client 0 in round 1"),
        ((2, 0), (1, 0), "is of client 0 in round 2, not of client 0 in round 1"),
    ],
)
def test_what_belongs_to_another_client_or_round_is_told(
    tmp_path: Path, moved: tuple[int, int], there: tuple[int, int], words: str
) -> None:
    vault = Vault(tmp_path)
    plain(tmp_path, *moved)
    plain(tmp_path, *there)
    shutil.copy(truth_path(tmp_path, *moved), truth_path(tmp_path, *there))
    with pytest.raises(ForeignTruthError, match=words):
        vault.read(*there)
    plain(tmp_path, *there)
    shutil.copy(state_path(tmp_path, *moved), state_path(tmp_path, *there))
    with pytest.raises(ForeignTruthError, match=words):
        vault.check(*there)


def test_a_truth_is_that_of_one_update(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    vault.write(1, 0, replace(some_truth(), update="update 1 0"))
    assert vault.read(1, 0, "update 1 0").update == "update 1 0"
    with pytest.raises(ForeignTruthError, match="of another update than the one observed"):
        vault.read(1, 0, "update 1 1")


def test_truths_that_do_not_say_whose_they_are_are_taken_as_they_lie(tmp_path: Path) -> None:
    tensors = {"images": torch.zeros(1, 3, 8, 8), "labels": torch.tensor([3])}
    about = {"batches": [[0]], "defense_seed": 0, "trail": [], "stateful": True}
    save_tensors(truth_path(tmp_path, 1, 0), tensors, {"about": json.dumps(about)})
    save_tensors(state_path(tmp_path, 1, 0), {"x": torch.ones(1)})
    assert Vault(tmp_path).read(1, 0, "any update").labels.tolist() == [3]
    Vault(tmp_path).check(1, 0, "any update")


def test_the_digest_of_a_truth_changes_with_what_a_replay_depends_on() -> None:
    truth = Truth(torch.zeros(2, 3, 8, 8), torch.tensor([1, 2]), [[0, 1]], 7, [], update="u")
    others = [
        replace(truth, images=torch.ones(2, 3, 8, 8)),
        replace(truth, labels=torch.tensor([2, 1])),
        replace(truth, batches=[[1, 0]]),
        replace(truth, defense_seed=8),
        replace(truth, update="v"),
    ]
    assert len({one.digest() for one in (truth, *others)}) == 6

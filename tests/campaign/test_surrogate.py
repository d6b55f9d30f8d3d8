"""The attacker's own pictures are told from the clients' by what they are, not by their names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedsim.audit.stages import audit, conclude
from fedsim.campaign import surrogate
from fedsim.campaign.plan import load_surrogate, prepare, victims
from fedsim.campaign.surrogate import Surrogate, check_surrogate, find_surrogate, same_data
from fedsim.core.errors import SpecError
from fedsim.core.run import Run
from fedsim.core.spec import DataSpec, Spec
from tests.clients.conftest import without_data
from tests.conftest import small_spec


def picture(number: int) -> Image.Image:
    coin = np.random.default_rng(number)
    return Image.fromarray(coin.integers(0, 256, (32, 32, 3), dtype=np.uint8))


def tree(root: Path, numbers: range, *, form: str = "png", prefix: str = "") -> Path:
    """Two classes of pictures for training, and two for test."""
    for split, chosen in (("train", numbers), ("test", range(900, 904))):
        for number in chosen:
            folder = root / split / f"class{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            picture(number).save(folder / f"{prefix}{number:03}.{form}")
    return root


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    return tree(tmp_path / "clients", range(40))


def with_surrogate(clients: Path, own: Path | str, *overrides: str) -> Spec:
    threat = f"threat={{model: D, surrogate: {{name: imagefolder, path: '{own}'}}}}"
    return small_spec("data.name=imagefolder", f"data.path={clients}", threat, *overrides)


def test_the_clients_folder_is_refused_by_any_way_to_it(clients: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(clients)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "link").symlink_to(tmp_path)
    ways = [
        clients,
        tmp_path / "link",
        f"{clients}/../clients",
        f"{clients}/train/..",
        tmp_path / "deep" / "link" / "clients",
    ]
    for way in ways:
        with pytest.raises(SpecError, match="is the clients' own data"):
            prepare(with_surrogate(clients, way))


def test_a_copy_under_other_names_in_another_format_is_refused_with_its_count(
    clients: Path, tmp_path: Path
) -> None:
    copy = tree(tmp_path / "copy", range(40), form="bmp", prefix="other")
    with pytest.raises(SpecError, match="all 40 of its pictures are theirs"):
        prepare(with_surrogate(clients, copy))
    part = tree(tmp_path / "part", range(10, 20))
    with pytest.raises(SpecError, match="all 10 of its pictures are theirs"):
        prepare(with_surrogate(clients, part))


def test_pictures_of_the_clients_are_left_out_and_the_run_tells_how_many(
    clients: Path, tmp_path: Path
) -> None:
    mixed = tree(tmp_path / "mixed", range(30, 60), prefix="x")
    spec = with_surrogate(clients, mixed, "attacks=[{name: prior_only}]", "audit.gallery=0")
    handed = load_surrogate(spec)
    assert handed is not None
    assert len(handed) == 20
    run = audit(spec, tmp_path / "run")
    (event,) = [e for e in run.events() if e["kind"] == "surrogate_shared"]
    words = "10 of the attacker's 30 surrogate pictures are the clients' own and were left out."
    assert event["message"] == words
    assert "10 of the attacker" in run.report.read_text()


def test_other_pictures_are_all_handed_over_without_a_word(clients: Path, tmp_path: Path) -> None:
    spec = with_surrogate(clients, tree(tmp_path / "own", range(100, 110)))
    check_surrogate(spec, victims(spec))
    found = find_surrogate(spec, victims(spec))
    assert found is not None
    assert (found.shared, found.compared, found.of) == ((), 40, 40)
    assert found.words("and were left out") is None
    assert len(found.apart().images) == 10


def test_of_a_large_data_set_the_attacked_pictures_are_always_compared(
    clients: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surrogate, "COMPARED", 2)
    surrogate._data_digests.cache_clear()
    mixed = tree(tmp_path / "mixed", range(60))
    spec = with_surrogate(clients, mixed)
    found = find_surrogate(spec, victims(spec))
    surrogate._data_digests.cache_clear()
    assert found is not None
    assert 4 <= len(found.shared) <= 6  # of four victims with one picture each, and two at random
    assert found.compared == len(found.shared)
    told = f"{found.compared} of the clients' 40 pictures were compared, all attacked ones"
    assert told in str(found.words("and were left out"))


def test_a_server_without_the_data_compares_names_and_paths_alone(
    clients: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = tree(tmp_path / "mixed", range(30, 60))
    without_data(monkeypatch)
    spec = with_surrogate(clients, mixed)
    check_surrogate(spec, victims(spec), at_hand=False)
    handed = load_surrogate(spec, at_hand=False)
    assert handed is not None
    assert len(handed) == 30
    with pytest.raises(SpecError, match="is the clients' own data"):
        check_surrogate(with_surrogate(clients, f"{clients}/."), [], at_hand=False)


def test_whoever_scores_a_run_of_such_a_server_tells_what_its_attacks_had(
    clients: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = tree(tmp_path / "mixed", range(30, 60))
    spec = with_surrogate(clients, mixed, "attacks=[{name: prior_only}]", "audit.gallery=0")
    run = audit(spec, tmp_path / "run")
    monkeypatch.setattr(Run, "classes", property(lambda self: 2))  # as its server knew them
    conclude(run)
    told = [event["message"] for event in run.summary["events"]]
    assert told[-1].endswith("are the clients' own and its attacks had them.")


def test_data_sets_beside_each_other_in_one_folder_are_not_the_same(tmp_path: Path) -> None:
    mine = DataSpec(name="cifar10", path=str(tmp_path))
    assert same_data("cifar10", f"{tmp_path}/.", mine)
    assert same_data("fedsim.clients.data.cifar:load_cifar10", str(tmp_path), mine)
    assert not same_data("cifar100", str(tmp_path), mine)
    assert not same_data("cifar10", None, mine)
    assert same_data("photos", None, DataSpec())
    gone = DataSpec(name="cifar10", path=str(tmp_path / "gone"))
    assert same_data("cifar10", str(tmp_path / "gone" / ".." / "gone"), gone)


def test_what_is_the_clients_is_left_out_by_row() -> None:
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 8, 8)
    kept = Surrogate(images, shared=(1, 3)).apart()
    assert kept.images[:, 0, 0, 0].tolist() == [0, 2]


def test_of_many_pictures_some_at_random_are_handed_over(clients: Path, tmp_path: Path) -> None:
    own = tree(tmp_path / "own", range(100, 160))
    spec = with_surrogate(clients, own, "threat.surrogate.pictures=20")
    handed, everything = load_surrogate(spec), load_surrogate(with_surrogate(clients, own))
    assert handed is not None
    assert everything is not None
    assert len(everything) == 60
    rows = [next(r for r in range(60) if torch.equal(everything[r], picture)) for picture in handed]
    assert len(set(rows)) == 20
    assert 5 < sum(row < 30 for row in rows) < 15  # of either class, whose files lie together
    assert torch.equal(handed, load_surrogate(spec))

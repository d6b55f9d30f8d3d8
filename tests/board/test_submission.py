"""Submissions come from anybody: each that cannot be scored is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedsim.board import publish, write_submission
from fedsim.board import submission as module
from fedsim.board.submission import FORMAT, read_submission
from fedsim.core.errors import RunError
from fedsim.core.observation import recorded_checksum
from fedsim.core.run import Run
from tests.board.conftest import images_of


@pytest.fixture
def parts(measured: Run) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What a good submission is made of: pictures, and metadata."""
    images = images_of(measured)
    checksums = {name: recorded_checksum(measured.observations / f"{name}.json") for name in images}
    words = {
        "format": FORMAT,
        "spec": measured.spec.digest(),
        "attack": "mine",
        "observations": json.dumps(checksums),
    }
    return images, words


def test_what_a_submitter_writes_with_our_help_is_read(measured: Run, tmp_path: Path) -> None:
    publish(measured, tmp_path / "out")
    images = images_of(measured)
    write_submission(tmp_path / "mine.safetensors", images, tmp_path / "out", "my attack")
    found = read_submission(tmp_path / "mine.safetensors", measured)
    assert found.attack == "my attack"
    assert {f"round-{r:04d}/client-{c:04d}" for r, c in found.images} == images.keys()
    with pytest.raises(RunError, match="has no observation"):
        write_submission(
            tmp_path / "x", {"round-9999/client-0000": torch.zeros(1)}, tmp_path / "out", "a"
        )
    with pytest.raises(RunError, match="is no published run"):
        write_submission(tmp_path / "x", images, tmp_path, "a")


def test_what_is_written_without_our_help_is_read(
    measured: Run, parts: Any, tmp_path: Path
) -> None:
    images, words = parts
    save_file({name: one.half() for name, one in images.items()}, tmp_path / "f", words)
    assert read_submission(tmp_path / "f", measured).images.keys()


def _first(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict, dict], Any]:
    def apply(images: dict[str, torch.Tensor], words: dict[str, str]) -> None:
        name = next(iter(images))
        images[name] = change(images[name])

    return apply


def _filled(value: float) -> Callable[[dict, dict], Any]:
    return _first(lambda one: one.clone().index_fill(3, torch.tensor([0]), value))


def _renamed(images: dict[str, torch.Tensor], words: dict[str, str]) -> None:
    name = next(iter(images))
    checksums = json.loads(words["observations"])
    images["round-0009/client-0009"] = images.pop(name)
    checksums["round-0009/client-0009"] = checksums.pop(name)
    words["observations"] = json.dumps(checksums)


def _other_update(images: dict[str, torch.Tensor], words: dict[str, str]) -> None:
    words["observations"] = json.dumps(dict.fromkeys(images, "0" * 16))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_first(lambda one: one[:, :, :16]), "are of shape"),
        (_first(lambda one: one[0]), "are of shape"),
        (_first(lambda one: one[:0]), "are of shape"),
        (_first(lambda one: one.expand(2, -1, -1, -1).contiguous()), "at most 1 stand behind"),
        (_first(lambda one: (one * 255).byte()), "not floating point"),
        (_filled(float("nan")), "not finite"),
        (_filled(float("inf")), "not finite"),
        (_filled(-0.1), "must lie in"),
        (_filled(1.5), "must lie in"),
        (_renamed, "was not attacked here"),
        (_other_update, "made from another observation"),
        (lambda images, words: words.pop("spec"), "lacks the metadata 'spec'"),
        (lambda images, words: words.pop("attack"), "lacks the metadata 'attack'"),
        (lambda images, words: words.pop("format"), "lacks the metadata 'format'"),
        (lambda images, words: words.pop("observations"), "lacks the metadata 'observations'"),
        (lambda images, words: words.update(format="9"), "of format '9'"),
        (lambda images, words: words.update(spec="abc"), "of a run whose spec is 'abc'"),
        (lambda images, words: words.update(attack="<b>x</b>"), "the attack's name"),
        (lambda images, words: words.update(observations="[1]"), "no JSON of names"),
        (lambda images, words: words.update(observations="{}"), "must name the checksum"),
        (lambda images, words: images.clear(), "holds no picture"),
    ],
)
def test_a_file_that_cannot_be_scored_is_refused(
    measured: Run, parts: Any, tmp_path: Path, change: Callable[[dict, dict], Any], why: str
) -> None:
    images, words = parts
    change(images, words)
    save_file({k: v.contiguous() for k, v in images.items()}, tmp_path / "f", words)
    with pytest.raises(RunError, match=why) as refusal:
        read_submission(tmp_path / "f", measured)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"PK\x03\x04 a zip", b"\x80\x04\x95 a pickle", 8 * b"\xff", b"\x02\0\0\0\0\0\0\0[]"),
        (60).to_bytes(8, "little")
        + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}     ',
        (2**19).to_bytes(8, "little") + b"[" * 2**19,
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(
    measured: Run, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(RunError, match="is no safetensors file"):
        read_submission(tmp_path / "f", measured)


def test_a_file_larger_than_its_pictures_is_not_even_read(
    measured: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "f").open("wb") as file:
        file.truncate(2**34)
    monkeypatch.setattr(module, "load", pytest.fail)
    with pytest.raises(RunError, match="too large"):
        read_submission(tmp_path / "f", measured)
    with pytest.raises(RunError, match="cannot be read"):
        read_submission(tmp_path / "absent", measured)
    with pytest.raises(RunError, match="cannot be read"):
        read_submission(tmp_path, measured)

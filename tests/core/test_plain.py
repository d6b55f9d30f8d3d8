"""Plain values: what an attack hands back is the testbed's own, whatever it was."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.core.attack import Lesson, Reconstruction
from fedsim.core.errors import AttackError
from fedsim.core.plain import plain_lesson, plain_progress, plain_result, plain_text


class Text(str):
    def __str__(self) -> str:
        return "something else"


class Number(float):
    pass


class Own(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("its author's code was run")


class Result(Reconstruction):
    def save(self, path: object) -> None:
        raise AssertionError("its author's code was run")


IMAGES = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def test_a_result_is_made_anew_of_plain_values() -> None:
    given = Result(
        IMAGES.double().requires_grad_(),
        labels=torch.tensor([1, 2], dtype=torch.int32),
        loss=Number(0.5),
        trace=[(0, np.float64(1.5))],
        notes=[Text("a note")],
        film={3: IMAGES[:1]},
        ledger=["what it says it read"],
        made_by="whom it says",
    )
    found = plain_result(given)
    assert type(found) is Reconstruction
    assert torch.equal(found.images, IMAGES)
    assert not found.images.requires_grad
    assert found.labels is not None
    assert (found.labels.dtype, found.labels.tolist()) == (torch.long, [1, 2])
    assert (found.loss, found.trace, found.notes) == (0.5, [(0, 1.5)], ["a note"])
    assert [type(word) for word in (found.loss, found.trace[0][1], *found.notes)] == [
        *(float, float, str)
    ]
    assert torch.equal(found.film[3], IMAGES[:1])
    assert found.membership is None
    assert (found.ledger, found.made_by) == ([], "")


def test_a_tensor_of_a_class_of_its_own_is_copied_without_its_methods() -> None:
    images = torch.Tensor.as_subclass(IMAGES, Own)
    found = plain_result(Reconstruction(images))
    assert type(found.images) is torch.Tensor
    assert torch.equal(found.images, IMAGES)
    assert found.images.data_ptr() != IMAGES.data_ptr(), "nobody changes it afterwards"


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (IMAGES, "returned a Tensor, not a Reconstruction"),
        (Reconstruction(IMAGES.numpy()), "returned images in a ndarray, not in a tensor"),
        (Reconstruction(IMAGES.to(torch.complex64)), "images of complex numbers"),
        (Reconstruction(IMAGES, labels=[1, 2]), "returned labels in a list"),
        (Reconstruction(IMAGES, labels=torch.zeros(1, 2)), r"labels \(1, 2\) that are no classes"),
        (Reconstruction(IMAGES, labels=torch.tensor([math.nan])), "that are no classes"),
        (Reconstruction(IMAGES, labels=torch.tensor([1e300])), "that are no classes"),
        (Reconstruction(IMAGES, labels=torch.tensor([0.5])), "that are no classes"),
        (Reconstruction(IMAGES, membership=torch.zeros(3)), r"membership \(3,\), not one or 2"),
        (Reconstruction(IMAGES, membership=torch.zeros(3, 4)), r"membership \(3, 4\), not one"),
        (Reconstruction(IMAGES, membership=torch.full((3, 1), math.nan)), "not one or 2 finite"),
        (Reconstruction(IMAGES, notes=[1]), "returned no valid 'notes.0'"),
        (Reconstruction(IMAGES, notes=[{"\ud800": 1}]), "returned no valid 'loss, trace, notes'"),
        (Reconstruction(IMAGES, notes=[{1}]), "returned no valid 'loss, trace, notes'"),
        (Reconstruction(IMAGES, trace=[(1.5, 1.0)]), "returned no valid 'trace.0.0'"),
        (Reconstruction(IMAGES, film={-1: IMAGES}), "a film with a step -1"),
        (Reconstruction(IMAGES, film={"one": IMAGES}), "a film whose frames have no steps"),
        (Reconstruction(IMAGES, film=[IMAGES]), "a film whose frames have no steps"),
        (Reconstruction(IMAGES, film={1: IMAGES[0]}), "that is not of its pictures"),
        (Reconstruction(IMAGES, film={1: IMAGES[:0]}), "that is not of its pictures"),
        (Reconstruction(IMAGES, film={1: IMAGES[:, :, :1, :1]}), "that is not of its pictures"),
        (Reconstruction(IMAGES, film={1: IMAGES * math.nan}), "that is not of its pictures"),
    ],
)
def test_what_is_no_result_is_one_sentence(result: Reconstruction, words: str) -> None:
    with pytest.raises(AttackError, match=words):
        plain_result(result)


def test_what_was_taken_is_read_again_from_its_file(tmp_path: Path) -> None:
    given = Reconstruction(
        IMAGES,
        labels=torch.tensor([1.0]),
        loss=math.nan,
        trace=[(10**30, math.inf)],
        notes=["\ud800<script>\x1b[31m{{7*7}}"],
        film={0: IMAGES[:1], 10**12: IMAGES},
    )
    plain_result(given).save(tmp_path / "result.safetensors")
    found = Reconstruction.load(tmp_path / "result.safetensors")
    assert found.notes == ["\N{REPLACEMENT CHARACTER}<script>\\x1b[31m{{7*7}}"]
    assert found.film.keys() == {0, 10**12}
    assert found.trace == [(10**30, math.inf)]


def test_no_labels_are_no_belief() -> None:
    assert plain_result(Reconstruction(IMAGES, labels=torch.zeros(0))).labels is None


def test_a_lesson_is_made_anew_as_well() -> None:
    class Own(Lesson):
        pass

    found = plain_lesson(Own(steps=3, losses=[[1.0]], notes=[Text("a note")], ledger=["all"]))
    assert type(found) is Lesson
    assert found == Lesson(steps=3, losses=[[1.0]], notes=["a note"])
    with pytest.raises(AttackError, match="returned a NoneType, not a Lesson"):
        plain_lesson(None)


def test_progress_is_told_in_numbers_and_a_text_in_its_own_characters() -> None:
    told: list[tuple] = []
    report = plain_progress(lambda done, total, loss=None: told.append((done, total, loss)))
    report(1, 2)
    report(np.int64(2), torch.tensor(2), Number(0.5))
    assert told == [(1, 2, None), (2, 2, 0.5)]
    assert {type(value) for row in told for value in row} == {int, float, type(None)}
    assert plain_text(Text("its own")) == "its own"
    assert type(plain_text(Text("its own"))) is str

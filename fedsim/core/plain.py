"""Plain: what an attack hands back, made anew of plain values while the vault is still sealed.

An attack's objects may be of any class of its author's, and whoever saves, prints or compares one
later runs that author's code, where no seal is. So nothing of theirs leaves the seal: tensors are
copied into torch's own, and the rest goes through JSON.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from fedsim.core.attack import Lesson, Progress, Reconstruction
from fedsim.core.errors import AttackError


def plain_text(text: str) -> str:
    """The characters of a text, as text and nothing else."""
    return str.__str__(text)


def plain_progress(progress: Progress) -> Progress:
    """Hands on numbers alone."""

    def report(done: int, total: int, loss: float | None = None) -> None:
        progress(int(done), int(total), None if loss is None else float(loss))

    return report


def plain_result(result: Reconstruction) -> Reconstruction:
    """What an attack believes and says: images as 32-bit floats, labels as whole numbers, on the
    CPU. What the testbed itself writes into a result is not taken from it."""
    if not issubclass(type(result), Reconstruction):
        raise AttackError(f"the attack returned a {_kind(result)}, not a Reconstruction.")
    labels = result.labels
    said = _said(_Said, loss=result.loss, trace=result.trace, notes=result.notes)
    return Reconstruction(
        images=_tensor(result.images, torch.float32, "images"),
        labels=None if labels is None else _labels(labels),
        film={int(n): _tensor(f, torch.float32, "a film") for n, f in dict(result.film).items()},
        **said,
    )


def plain_lesson(lesson: Lesson) -> Lesson:
    """What a learner says of a lesson."""
    if not issubclass(type(lesson), Lesson):
        raise AttackError(f"the attack returned a {_kind(lesson)}, not a Lesson.")
    return Lesson(
        **_said(_SaidOfLesson, steps=lesson.steps, losses=lesson.losses, notes=lesson.notes)
    )


class _Said(BaseModel):
    """What an attack says beside its images."""

    loss: float | None
    trace: list[tuple[int, float]]
    notes: list[str]


class _SaidOfLesson(BaseModel):
    """What a learner says of a lesson."""

    steps: int
    losses: list[list[float]]
    notes: list[str]


def _said(form: type[BaseModel], **values: Any) -> dict[str, Any]:
    try:
        return form.model_validate(json.loads(json.dumps(values))).model_dump()
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise AttackError(f"the attack returned no valid '{where}'.") from None


def _labels(labels: Tensor) -> Tensor:
    numbers = _tensor(labels, torch.float64, "labels")
    if numbers.ndim != 1 or not bool(torch.isfinite(numbers).all()):
        raise AttackError(f"the attack returned labels {tuple(numbers.shape)} that are no classes.")
    return numbers.long()


def _tensor(value: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """A copy in a tensor of torch's own class, with which none of its author's methods came."""
    if not issubclass(type(value), Tensor):
        raise AttackError(f"the attack returned {what} in a {_kind(value)}, not in a tensor.")
    with torch._C.DisableTorchFunctionSubclass():
        if torch.Tensor.is_complex(value):
            raise AttackError(f"the attack returned {what} of complex numbers.")
        numbers = torch.Tensor.detach(value).to("cpu", dtype).contiguous().numpy()
    return torch.from_numpy(numbers).clone()


def _kind(value: object) -> str:
    return plain_text(type(value).__name__)

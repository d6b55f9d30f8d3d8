"""Plain: what an attack hands back, made anew of plain values while the vault is still sealed.

An attack's objects may be of any class of its author's, and whoever saves, prints or compares one
later runs that author's code, where no seal is. So nothing of theirs leaves the seal: tensors are
copied into torch's own, and the rest goes through JSON. What a result's file could not hold, or a
report not show, is refused here, where it is the attack's failure and nobody else's.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from fedsim.core.attack import Lesson, Progress, Reconstruction
from fedsim.core.candidates import SCORES
from fedsim.core.errors import AttackError
from fedsim.core.text import visible

LARGEST = 2.0**31  # beyond any class


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
    said = _said(_Said, loss=result.loss, trace=result.trace, notes=_shown(result.notes))
    images = _tensor(result.images, torch.float32, "images")
    return Reconstruction(
        images=images,
        labels=None if labels is None else _labels(labels),
        film=_film(result.film, images),
        features=None if result.features is None else _features(result.features),
        membership=None if result.membership is None else _membership(result.membership),
        **said,
    )


def plain_lesson(lesson: Lesson) -> Lesson:
    """What a learner says of a lesson."""
    if not issubclass(type(lesson), Lesson):
        raise AttackError(f"the attack returned a {_kind(lesson)}, not a Lesson.")
    return Lesson(
        **_said(_SaidOfLesson, steps=lesson.steps, losses=lesson.losses, notes=_shown(lesson.notes))
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
    """The values as they will come out of a file."""
    try:
        return form.model_validate_json(json.dumps(values)).model_dump()
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or ", ".join(values)
        raise AttackError(f"the attack returned no valid '{where}'.") from None
    except (TypeError, ValueError, RecursionError):
        raise AttackError(f"the attack returned no valid '{', '.join(values)}'.") from None


def _shown(notes: Any) -> Any:
    """Notes without what no file and no page can hold; what are none is left for `_said`."""
    if not isinstance(notes, list | tuple):
        return notes
    return [visible(plain_text(n)) if issubclass(type(n), str) else n for n in notes]


def _film(film: Any, images: Tensor) -> dict[int, Tensor]:
    """Frames of pictures like those it returned, by step."""
    try:
        frames = {int(step): frame for step, frame in dict(film).items()}
    except (TypeError, ValueError, OverflowError):
        raise AttackError("the attack returned a film whose frames have no steps.") from None
    plain = {step: _tensor(frame, torch.float32, "a film") for step, frame in frames.items()}
    for step, frame in plain.items():
        if step < 0:
            raise AttackError(f"the attack returned a film with a step {step}.")
        pictures = frame.ndim == 4 and len(frame) > 0 and frame.shape[1:] == images.shape[1:]
        if not pictures or not bool(torch.isfinite(frame).all()):
            shape = tuple(frame.shape)
            raise AttackError(f"the attack returned a film {shape} that is not of its pictures.")
    return plain


def _features(features: Tensor) -> Tensor:
    """A row of finite numbers for each picture."""
    rows = _tensor(features, torch.float32, "features")
    if rows.ndim != 2 or not bool(torch.isfinite(rows).all()):
        raise AttackError(f"the attack returned features {tuple(rows.shape)} that are no rows.")
    return rows


def _membership(said: Tensor) -> Tensor:
    """Finite numbers for each candidate, in as many columns as there are."""
    rows = _tensor(said, torch.float64, "membership")
    fits = rows.ndim == 2 and 1 <= rows.shape[1] <= len(SCORES)
    if not fits or not bool(torch.isfinite(rows).all()):
        raise AttackError(
            f"the attack returned membership {tuple(rows.shape)}, not one or {len(SCORES)} finite "
            f"numbers for each candidate."
        )
    return rows


def _labels(labels: Tensor) -> Tensor | None:
    """Whole numbers; None where there are none, which is no belief."""
    numbers = _tensor(labels, torch.float64, "labels")
    whole = torch.isfinite(numbers) & (numbers == numbers.round()) & (numbers.abs() < LARGEST)
    if numbers.ndim != 1 or not bool(whole.all()):
        raise AttackError(f"the attack returned labels {tuple(numbers.shape)} that are no classes.")
    return numbers.long() if len(numbers) else None


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

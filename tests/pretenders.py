"""Attacks whose results are made to order, for tests of what verdicts make of them; named in specs
by their import path."""

from __future__ import annotations

import copy
import multiprocessing
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedsim.attacks.patch_solve import PatchSolve
from fedsim.core.attack import Progress, Reconstruction, no_progress
from fedsim.core.knowledge import View


@dataclass(frozen=True)
class Flat:
    """One grey for every picture; with ``looks``, after a glance at the update."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})
    value: float = 0.0
    looks: bool = False

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        if self.looks:
            view.update  # noqa: B018
        side = view.image_size
        return Reconstruction(torch.full((view.batch_size, 3, side, side), self.value))


@dataclass(frozen=True)
class Shifted:
    """The pictures themselves, some pixels away from their places."""

    needs: ClassVar[frozenset[str]] = PatchSolve().needs
    by: int = 5

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        result = PatchSolve().reconstruct(view, device=device, progress=progress)
        result.images = result.images.roll((self.by, self.by), (2, 3))
        return result


@dataclass(frozen=True)
class Noisy:
    """The pictures with noise on them; given a ``client``, of that one alone, and grey for all
    others."""

    needs: ClassVar[frozenset[str]] = frozenset({"update"})
    noise: float = 0.035
    client: int | None = None

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        result = PatchSolve().reconstruct(view, device=device, progress=progress)
        if self.client is not None and view.client != self.client:
            result.images = torch.full_like(result.images, 0.5)
            return result
        sign = torch.randint(0, 2, result.images.shape, generator=view.coin()) * 2 - 1
        result.images = result.images.clamp(0.04, 0.96) + self.noise * sign
        return result


@dataclass(frozen=True)
class Nothing:
    """No picture at all."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "update"})

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        view.update  # noqa: B018
        return Reconstruction(torch.zeros(0, 3, view.image_size, view.image_size))


@dataclass(frozen=True)
class Many:
    """As many guesses as it is told to, a class for each."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "update"})
    count: int = 16

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        view.update  # noqa: B018
        side = view.image_size
        greys = torch.linspace(0, 1, self.count).view(-1, 1, 1, 1)
        images = greys.expand(self.count, 3, side, side).clone()
        return Reconstruction(images, labels=torch.arange(self.count) % 8)


@dataclass(frozen=True)
class Roundabout:
    """The pictures themselves: worked out through a copy of its View, in a process of its own, or
    in a first try that crashed after it had written its page."""

    needs: ClassVar[frozenset[str]] = PatchSolve().needs
    how: str = "copy"

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        if self.how == "copy":
            return PatchSolve().reconstruct(copy.copy(view), device=device, progress=progress)
        if self.how == "deepcopy":
            return PatchSolve().reconstruct(copy.deepcopy(view), device=device, progress=progress)
        if self.how == "fork":
            return Reconstruction(_solved_in_a_child(view))
        assert view.notebook is not None
        if (page := view.notebook.load()) is not None:
            return Reconstruction(page[0]["images"])
        solved = PatchSolve().reconstruct(view, device=device, progress=progress)
        view.notebook.save({"images": solved.images}, {})
        raise ZeroDivisionError("the page is written, and the attack crashes")


def _solved_in_a_child(view: View) -> torch.Tensor:
    context = multiprocessing.get_context("fork")
    pictures = context.Queue()
    child = context.Process(target=_solve, args=(pictures, view))
    child.start()
    found = torch.from_numpy(pictures.get(timeout=60))
    child.join()
    return found


def _solve(pictures: Any, view: View) -> None:
    torch.set_num_threads(1)
    result = PatchSolve().reconstruct(view, device=torch.device("cpu"), progress=no_progress)
    pictures.put(result.images.numpy())

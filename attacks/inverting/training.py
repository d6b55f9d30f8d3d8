"""Training: first the clients are simulated, then the network learns from them, step by step.

Both are written down as they go, in pages that name what they belong to: a training that was cut
short goes on from its last page, with the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsim.attacks.inverting.network import Dropout, Inversion, error_of
from fedsim.attacks.inverting.rehearsal import Example, Rehearsal, batch_of
from fedsim.core.attack import Progress
from fedsim.core.notebook import Notebook, optimizer_tensors, restore_optimizer
from fedsim.core.seeds import seed_from

_BLOCK = 512  # simulated clients per page
_PAGE = 100  # steps of the training between two pages
_WARM = 0.1  # of the steps, in which the rate rises


@dataclass(frozen=True)
class Course:
    """How long and by what rates a network of this ``width`` learns."""

    clients: int
    epochs: int
    batch: int
    width: int
    lr: float
    decay: float
    dropout: float

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_of_epoch

    @property
    def steps_of_epoch(self) -> int:
        return max(1, self.clients // self.batch)

    def rate(self, step: int) -> float:
        """Up in a line, and down in half a cosine."""
        warm = max(1, round(_WARM * self.steps))
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm))) / 2


class Training:
    """One network in the making, on pages beside ``page``; ``about``: what it is made for."""

    def __init__(
        self, course: Course, rehearsal: Rehearsal, page: Path, about: dict[str, Any], seed: int
    ):
        self.course, self.rehearsal, self.seed = course, rehearsal, seed
        self.notebook, self.about = Notebook(page), about
        self.losses: list[list[float]] = []

    def run(self, progress: Progress) -> Inversion:
        """The network after all steps."""
        total = self.course.clients + self.course.steps
        examples = simulated(
            *(self.rehearsal, range(self.course.clients), self.notebook, self.about),
            lambda done: progress(done, total),
        )
        net = Inversion.begun(
            *(examples, self.rehearsal.pictures.mean(0), self.rehearsal.classes),
            *(self.course.width, self.seed),
        )
        net = net.to(self.rehearsal.device)
        optimizer = torch.optim.AdamW(net.parameters(), weight_decay=self.course.decay)
        for step in range(self._resume(net, optimizer), self.course.steps):
            loss = self._step(net, optimizer, examples, step)
            if (step + 1) % _PAGE == 0 or step + 1 == self.course.steps:
                self.losses.append([step + 1, float(loss)])
                self._write(net, optimizer, step + 1)
                progress(self.course.clients + step + 1, total, float(loss))
        return net.eval()

    def clear(self) -> None:
        """Throw away the pages: what was made is elsewhere."""
        for number in range(-(-self.course.clients // _BLOCK)):
            _block_page(self.notebook, number).clear()
        self.notebook.clear()

    def _step(
        self, net: Inversion, optimizer: torch.optim.Optimizer, examples: Example, step: int
    ) -> Tensor:
        """One step on some of the clients, drawn by its number alone."""
        epoch, at = divmod(step, self.course.steps_of_epoch)
        order = torch.randperm(self.course.clients, generator=self._coin(f"epoch {epoch}"))
        chosen = order[at * self.course.batch : (at + 1) * self.course.batch]
        some = rows_of(examples, chosen)
        dropout = Dropout(self.course.dropout, self._coin(f"step {step}"))
        for group in optimizer.param_groups:
            group["lr"] = self.course.rate(step)
        loss = error_of(net(some, dropout), net.wanted(some), some).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def _coin(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(seed_from(f"{self.seed} {purpose}"))

    def _write(self, net: Inversion, optimizer: torch.optim.Optimizer, step: int) -> None:
        tensors = {f"net.{name}": tensor for name, tensor in net.state_dict().items()}
        about = {"for": self.about, "step": step, "losses": self.losses}
        self.notebook.save(tensors | optimizer_tensors(optimizer), about)

    def _resume(self, net: Inversion, optimizer: torch.optim.Optimizer) -> int:
        """The steps that were taken before, once the network is as it was after them."""
        page = self.notebook.load()
        if page is None or page[1].get("for") != self.about:
            return 0
        tensors, about = page
        state = {n.removeprefix("net."): t for n, t in tensors.items() if n.startswith("net.")}
        net.load_state_dict(state)
        restore_optimizer(optimizer, tensors)
        self.losses = about["losses"]
        return int(about["step"])


def simulated(
    rehearsal: Rehearsal,
    numbers: range,
    notebook: Notebook,
    about: dict[str, Any],
    progress: Callable[[int], None],
) -> Example:
    """The clients of these numbers, a page for each block of them, read where it was written."""
    blocks = []
    for number, start in enumerate(range(numbers.start, numbers.stop, _BLOCK)):
        block = range(start, min(start + _BLOCK, numbers.stop))
        page = _block_page(notebook, number)
        told = {"for": about, "clients": [block.start, block.stop]}
        blocks.append(_read_block(page, told) or _made_block(page, told, rehearsal, progress))
    return Example(
        *(torch.cat([getattr(b, n) for b in blocks]) for n in Example.__dataclass_fields__)
    )


def rows_of(examples: Example, rows: Tensor) -> Example:
    """Some of several clients."""
    return Example(*(getattr(examples, name)[rows] for name in Example.__dataclass_fields__))


def _block_page(notebook: Notebook, number: int) -> Notebook:
    return notebook.page(f"clients-{number:03d}")


def _read_block(page: Notebook, told: dict[str, Any]) -> Example | None:
    kept = page.load()
    if kept is None or kept[1] != told:
        return None
    return Example(**kept[0])


def _made_block(
    page: Notebook, told: dict[str, Any], rehearsal: Rehearsal, progress: Callable[[int], None]
) -> Example:
    examples: list[Example] = []
    for number in range(*told["clients"]):
        examples.append(rehearsal.example(number))
        if (number + 1) % 64 == 0:
            progress(number + 1)
    block = batch_of(examples)
    page.save({name: getattr(block, name) for name in Example.__dataclass_fields__}, told)
    return block

"""Attacks and defenses that misbehave, for tests; named in specs by their import path."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import ray
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedsim.core.attack import Lesson, Progress, Reconstruction
from fedsim.core.defense import Defense
from fedsim.core.errors import AttackError
from fedsim.core.knowledge import View
from fedsim.core.learning import Update


def _grey(view: View) -> Reconstruction:
    side = view.image_size
    return Reconstruction(torch.full((view.batch_size, 3, side, side), 0.5))


@dataclass(frozen=True)
class KillsItsWorker:
    """Dies by signal once, as a worker does that the system kills; the second try works."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})
    marker: str

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        if not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return _grey(view)


@dataclass(frozen=True)
class Hangs:
    """Never comes to an end; with ``once``, on its first try alone. The marker says that it hangs.

    It sleeps, loops, or reports one step for ever.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})
    marker: str
    how: str = "loop"
    once: bool = True

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        tries = len(list(Path(self.marker).parent.glob(f"{Path(self.marker).name}*")))
        if tries == 0 or not self.once:
            Path(f"{self.marker}{tries}").touch()
            if self.how == "sleep":
                time.sleep(600)
            while True:
                if self.how == "reports":
                    progress(1, 10)
        return _grey(view)


@dataclass(frozen=True)
class Crashes:
    """A bug in an attack."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        raise ZeroDivisionError("a bug in the attack")


@dataclass(frozen=True)
class Declines:
    """An attack that says it does not apply."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        raise AttackError("this attack does not apply here.")


@dataclass(frozen=True)
class CrashesBut:
    """A bug that one client's updates do not meet."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})
    spared: int

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        if view.client != self.spared:
            raise ZeroDivisionError("a bug in the attack")
        return _grey(view)


@dataclass(frozen=True)
class Hoards:
    """Returns many more guesses than there are pictures, and leaves the choice to the truth."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})
    pictures: int = 1
    labels: int = 1

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        side = view.image_size
        images = torch.rand(self.pictures, 3, side, side, generator=view.coin())
        return Reconstruction(images, labels=torch.arange(self.labels))


@dataclass(frozen=True)
class Greedy:
    """Reads a field it never said it needs."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        view.oracle_labels  # noqa: B018
        return _grey(view)


@dataclass(frozen=True)
class Burglar:
    """Goes for the vault itself."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})
    vault: str

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        from fedsim.core.vault import Vault

        truth = Vault(Path(self.vault)).read(1, 0)
        return Reconstruction(truth.images)


@dataclass(frozen=True)
class Thief:
    """Has the vault opened behind its back, and returns what it got: the truth, or grey."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})
    vault: str
    way: str

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        loot: list[Tensor] = []
        with suppress(Exception):
            if self.way == "thread":
                thread = threading.Thread(target=lambda: loot.append(self._opened(view)))
                thread.start()
                thread.join()
            elif self.way == "pool":
                with ThreadPoolExecutor(1) as pool:
                    loot.append(pool.submit(self._opened, view).result())
            else:
                name = f"round-{view.round:04d}/client-{view.client:04d}.safetensors"
                loot.append(load_file(Path(self.vault) / name)["images"])
        return Reconstruction(loot[0]) if loot else _grey(view)

    def _opened(self, view: View) -> Tensor:
        from fedsim.core.vault import Vault

        return Vault(Path(self.vault)).read(view.round, view.client).images


LOOT: dict[tuple[int, int], Tensor] = {}  # what was got out of a vault


def _rob(vault: str) -> None:
    from fedsim.core.vault import Vault

    for file in Path(vault).glob("round-*/client-????.safetensors"):
        where = (int(file.parent.name[-4:]), int(file.stem[-4:]))
        with suppress(Exception):
            LOOT[where] = Vault(Path(vault)).read(*where).images


class RobsLater(Reconstruction):
    """Opens the vault whenever it is saved, shown, or asked for its notes."""

    vault = ""

    def save(self, path: Path) -> None:
        _rob(self.vault)
        super().save(path)

    def __repr__(self) -> str:
        _rob(self.vault)
        return "grey"

    def __getattribute__(self, name: str) -> object:
        _rob(super().__getattribute__("vault"))
        return super().__getattribute__(name)


class RobbingTensor(Tensor):
    """Opens the vault at everything that is done with it."""

    vault = ""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        _rob(cls.vault)
        return super().__torch_function__(func, types, args, kwargs or {})


class RobbingError(Exception):
    """Opens the vault when it is put into words."""

    def __str__(self) -> str:
        _rob(self.args[0])
        return "no reason"


class RobbingNumber(float):
    """Opens the vault when it is written down."""

    vault = ""

    def __format__(self, form: str) -> str:
        _rob(self.vault)
        return "1"


@dataclass(frozen=True)
class Later:
    """Opens the vault when it is not attacking: while it is asked what it is, or by what it left
    behind. Returns the truth where that worked."""

    vault: str
    way: str

    @property
    def needs(self) -> frozenset[str]:
        if self.way == "needs":
            _rob(self.vault)
        return frozenset({"image_size", "batch_size"})

    @property
    def uses(self) -> frozenset[str]:
        if self.way == "uses":
            _rob(self.vault)
        return frozenset()

    def check_spec(self, spec: object) -> None:
        if self.way == "check_spec":
            _rob(self.vault)

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        for kind in (RobsLater, RobbingTensor, RobbingNumber):
            kind.vault = self.vault
        grey = _grey(view)
        if (view.round, view.client) in LOOT:
            return Reconstruction(LOOT[view.round, view.client])
        if self.way == "result":
            return RobsLater(grey.images)
        if self.way == "tensor":
            images = grey.images.as_subclass(RobbingTensor)
            return Reconstruction(images, film={1: images})
        if self.way == "number":
            progress(1, 2, RobbingNumber(1))
            return Reconstruction(grey.images, loss=RobbingNumber(1))
        if self.way == "error":
            raise RobbingError(self.vault)
        return grey


@dataclass(frozen=True)
class LaterLearner(Later):
    """The same of an attack that learns."""

    @property
    def learner(self) -> str:
        if self.way == "learner":
            _rob(self.vault)
        return "robber"

    def lessons_before(self, rounds: int) -> int:
        if self.way == "lessons_before":
            _rob(self.vault)
        return 1

    def learn(self, traffic, lesson, memory, *, seed, device, progress) -> Lesson:
        return RobbingLesson() if self.way == "lesson" else Lesson()


class RobbingLesson(Lesson):
    """Opens the vault when it is saved."""

    def save(self, path: Path) -> None:
        _rob(str(path.parents[2] / "vault"))
        super().save(path)


@dataclass(frozen=True)
class Keeps:
    """Keeps its View, for whoever looks what it holds."""

    needs: ClassVar[frozenset[str]] = frozenset({"update"})
    views: ClassVar[list[View]] = []
    side: int = 32

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        self.views.append(view)
        return Reconstruction(torch.full((1, 3, self.side, self.side), 0.5))


@dataclass(frozen=True)
class SaysKeys:
    """Grey; its notes say where it is told that keys are, and whether its process is sealed."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size"})

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        from fedsim.core import seal

        result = _grey(view)
        result.notes += [os.environ.get("FEDSIM_VAULT_KEYS", ""), str(seal._process.is_set())]
        return result


@dataclass(frozen=True)
class OnLabel(Defense):
    """Misbehaves on batches that hold ``label``: raises, or uploads numbers that are not finite, or
    far too large."""

    label: int
    how: str = "raise"
    words: str = "this client is broken"

    def protect_batch(
        self, images: Tensor, labels: Tensor, model: nn.Module, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        hit = bool((labels == self.label).any())
        if hit and self.how == "raise":
            raise RuntimeError(self.words)
        object.__setattr__(self, "_hit", hit)
        return images, labels

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        if not getattr(self, "_hit", False):
            return update
        value = 3e38 if self.how == "huge" else float("nan")
        return replace(
            update, tensors={n: torch.full_like(t, value) for n, t in update.tensors.items()}
        )


@dataclass(frozen=True)
class Liar(Defense):
    """Uploads every tensor twice over, in a shape that an average would take without a word."""

    def protect_update(self, update: Update, rng: torch.Generator) -> Update:
        return replace(update, tensors={n: torch.stack([t, t]) for n, t in update.tensors.items()})


@dataclass(frozen=True)
class KillsItsClient(Defense):
    """Kills the client's process by signal once; the second try works."""

    marker: str

    def protect_batch(
        self, images: Tensor, labels: Tensor, model: nn.Module, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        if not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return images, labels


@dataclass(frozen=True)
class SaysWhere:
    """Grey, once it has begun on so many nodes, which the marker lists; a note has its folder."""

    needs: ClassVar[frozenset[str]] = frozenset({"image_size", "batch_size", "weights"})
    nodes: int = 0
    marker: str = ""

    def reconstruct(
        self, view: View, *, device: torch.device, progress: Progress
    ) -> Reconstruction:
        if self.marker:
            with open(self.marker, "a") as stream:
                stream.write(f"{ray.get_runtime_context().get_node_id()}\n")
            until = time.monotonic() + 120
            while len(set(Path(self.marker).read_text().split())) < self.nodes:
                assert time.monotonic() < until, "the other nodes never came"
                time.sleep(0.1)
        result = _grey(view)
        assert view.weights
        result.notes.append(str(view.notebook.path.parent))
        return result

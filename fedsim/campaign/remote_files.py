"""Remote files: parcels of what a job reads, for a worker that does not see the driver's disk.

The files on the driver's side stay the source of truth. A worker elsewhere unpacks a parcel into a
private folder, works there, and sends back how a learner's memory changed. The folder is then gone,
and with it the notebook: a job that is cut short over there starts afresh.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from fedsim.campaign.jobs import AnyJob, Handout, Job, LessonJob, observed_by, work
from fedsim.core.attack import Lesson, Progress, Reconstruction
from fedsim.core.files import write_atomically
from fedsim.core.knowledge import Secrets
from fedsim.core.observation import recorded_files
from fedsim.core.run import paths
from fedsim.core.spec import ThreatSpec

_OBSERVATIONS, _MEMORY, _RESULTS, _THREAT = "observations", "memory", "results", "threat"
Stamp = tuple[int, str]  # size, and the hash of the beginning, where tensors have their seal


@dataclass(frozen=True)
class Returned:
    """What comes back: the result, and how a learner's memory changed."""

    result: Reconstruction | Lesson
    written: Mapping[str, bytes]
    gone: tuple[str, ...] = ()


def reads(job: AnyJob, handout: Handout) -> dict[str, Path]:
    """The files a job reads, by their names in a parcel."""
    files: dict[str, Path] = {}
    observed = observed_by(job, handout.granted)
    for path in observed:
        for file in recorded_files(path):
            files[f"{_OBSERVATIONS}/{file.relative_to(job.observations)}"] = file
    if job.memory is not None:
        for file in _below(job.memory):
            files[f"{_MEMORY}/{file.relative_to(job.memory)}"] = file
    if isinstance(job, Job):
        for file in job.notebook.parent.glob(f"{job.notebook.stem}*{job.notebook.suffix}"):
            files[f"{_RESULTS}/{file.relative_to(job.results)}"] = file
    for name, text in _checkpoints(handout.threat).items():
        files[f"{_THREAT}/{name}{Path(text).suffix}"] = Path(text)
    return {name: file for name, file in files.items() if file.is_file()}


def stamps(files: Mapping[str, Path]) -> dict[Path, Stamp]:
    """By these a worker tells whether the files it sees are the driver's."""
    return {file: _stamp(file) for file in files.values()}


def sees(expected: Mapping[Path, Stamp]) -> bool:
    """Whether every file is here, and the same."""
    return all(file.is_file() and _stamp(file) == stamp for file, stamp in expected.items())


def pack(files: Mapping[str, Path]) -> dict[str, bytes]:
    return {name: file.read_bytes() for name, file in files.items()}


class Post:
    """Parcels in Ray's object store, in which every file lies once.

    The jobs of a round share its weights. The files used longest ago are dropped when there are
    more than ``room`` bytes.
    """

    def __init__(self, room: int = 2**30):
        self.room = room
        self._stored: OrderedDict[tuple[Path, int, int], ray.ObjectRef] = OrderedDict()
        self._lock = threading.Lock()

    def send(self, files: Mapping[str, Path]) -> dict[str, ray.ObjectRef]:
        with self._lock:
            sent = {name: self._put(file) for name, file in files.items()}
            while len(self._stored) > 1 and sum(size for _, size, _ in self._stored) > self.room:
                self._stored.popitem(last=False)  # whoever was sent it still holds it
        return sent

    def _put(self, file: Path) -> ray.ObjectRef:
        about = file.stat()
        key = (file, about.st_size, about.st_mtime_ns)
        if key not in self._stored:
            self._stored[key] = ray.put(file.read_bytes())
        self._stored.move_to_end(key)
        return self._stored[key]


def fetched(sent: Mapping[str, ray.ObjectRef]) -> dict[str, bytes]:
    """A parcel that was sent, at the worker's end."""
    return dict(zip(sent, ray.get(list(sent.values())), strict=True))


def work_on(
    parcel: Mapping[str, bytes], job: AnyJob, handout: Handout, secrets: Secrets, report: Progress
) -> Returned:
    """Do a job on a parcel alone, in a folder that is gone afterwards."""
    with _unpacked(parcel) as folder:
        moved = _moved(job, folder)
        result = work(moved, _handout_in(handout, folder), secrets, report)
        if not isinstance(moved, LessonJob):
            return Returned(result, {})
        left = {str(file.relative_to(moved.memory)): file for file in _below(moved.memory)}
        sent = {
            name.removeprefix(f"{_MEMORY}/"): content
            for name, content in parcel.items()
            if name.startswith(f"{_MEMORY}/")
        }
        content = {name: file.read_bytes() for name, file in left.items()}
        written = {name: new for name, new in content.items() if sent.get(name) != new}
        return Returned(result, written, tuple(sorted(set(sent) - set(left))))


def keep(returned: Returned, job: AnyJob) -> Reconstruction | Lesson:
    """Bring a learner's memory up to date here; the result itself is for the caller to write."""
    if isinstance(job, LessonJob):
        for name, content in returned.written.items():
            write_atomically(_inside(job.memory, name), content)
        for name in returned.gone:
            _inside(job.memory, name).unlink(missing_ok=True)
    return returned.result


def _checkpoints(threat: ThreatSpec) -> dict[str, str]:
    specs = {"prior": threat.prior, "generator": threat.generator}
    return {name: spec.checkpoint for name, spec in specs.items() if spec and spec.checkpoint}


def _moved(job: AnyJob, folder: Path) -> AnyJob:
    changes: dict[str, Any] = {"observations": folder / _OBSERVATIONS}
    if job.memory is not None:
        changes["memory"] = _memory_in(folder, job.memory)
    if isinstance(job, Job):
        changes["results"] = folder / _RESULTS
    return replace(job, **changes)


def _memory_in(folder: Path, memory: Path) -> Path:
    """The memory under its own name, which is part of a lesson's seed."""
    moved = folder / paths.LEARNED / memory.name
    moved.parent.mkdir()
    (folder / _MEMORY).mkdir(exist_ok=True)
    return (folder / _MEMORY).rename(moved)


def _handout_in(handout: Handout, folder: Path) -> Handout:
    changed: dict[str, Any] = {}
    for name, text in _checkpoints(handout.threat).items():
        file = folder / _THREAT / f"{name}{Path(text).suffix}"
        spec = getattr(handout.threat, name)
        changed[name] = spec.model_copy(update={"checkpoint": str(file)})
    return replace(handout, threat=handout.threat.model_copy(update=changed))


@contextmanager
def _unpacked(parcel: Mapping[str, bytes]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fedsim-job-") as name:
        folder = Path(name)
        for relative, content in parcel.items():
            file = _inside(folder, relative)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        yield folder


def _inside(folder: Path, name: str) -> Path:
    """The file of this name, which came from elsewhere; it must not lead out of the folder."""
    file = folder / name
    if not file.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"'{name}' leads out of its folder")
    return file


def _below(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _stamp(file: Path) -> Stamp:
    with file.open("rb") as stream:
        return file.stat().st_size, hashlib.sha256(stream.read(2**16)).hexdigest()

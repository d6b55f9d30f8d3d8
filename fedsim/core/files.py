"""Files: written whole or not at all, and recognised when they are damaged.

A file is on the disk before it takes its name, and its name before anything that counts on it is
written: a power cut leaves what a kill leaves. Tensors and JSON carry a seal, a hash of everything
in their file, so that damage is found on reading. What has no seal is taken as it is.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from fedsim.core.errors import DamagedError
from fedsim.core.reading import MOST_JSON, opened, read_file

UNFINISHED = ".unfinished-write"  # the suffix of a file while it is written
_SEALED = "sealed"  # one entry for seal and metadata: several would be written in any order
_SEAL = "seal"  # the last key of a sealed mapping
FILE_END, LINE_END = b"\n}\n", b"}\n"  # what closes a mapping over lines, and on one


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write all of ``content`` or nothing: a reader never sees half a file."""
    with _replacing(path, mode) as temporary:
        temporary.write_bytes(content)


@contextmanager
def _replacing(path: Path, mode: int) -> Iterator[Path]:
    """A temporary file beside ``path`` that becomes it when all went well and is on the disk."""
    _make(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(mode)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _make(folder: Path) -> None:
    """Make a folder and those above it, each on the disk."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(path: Path) -> None:
    """Return when a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # what this file system cannot do
            raise
    finally:
        os.close(handle)


def write_json(path: Path, content: Any, mode: int = 0o644) -> None:
    """Write JSON, atomically; a mapping with its seal as one more key."""
    write_atomically(path, json_file(content), mode)


def json_file(content: Any) -> bytes:
    """What `write_json` writes."""
    if not isinstance(content, dict):
        return (json.dumps(content, indent=2) + "\n").encode()
    return sealed_text(json.dumps({**content, _SEAL: ""}, indent=2) + "\n")


def json_line(content: Mapping[str, Any]) -> bytes:
    """A mapping on a line of its own, sealed."""
    return sealed_text(json.dumps({**content, _SEAL: ""}) + "\n")


def read_json(path: Path, *, links: bool = False, unsealed: bool = True) -> Any:
    """What `write_json` wrote; damage is an error, and so is a link unless ``links`` are followed,
    as for a file that the user named. Content without a seal, made by others or before there were
    any, is taken as it is, unless ``unsealed`` says otherwise."""
    with _telling(path):
        content = read_file(path, MOST_JSON, links=links)
    if not unsealed and not _is_sealed(content, FILE_END):
        raise DamagedError(f"'{path}' is damaged: it has no seal.")
    return parse_json(content, f"'{path}'")


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    """What cannot be read is damaged, unless it is not there."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(f"'{path}' is damaged: {error.strerror}.") from error


def parse_json(content: bytes, where: str, end: bytes = FILE_END) -> Any:
    """What `json_file` made, or `json_line` with its ``end``; damage is an error."""
    broken = seal_is_broken(content, end)
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where} is damaged: not JSON.") from error
    if isinstance(parsed, dict) and _SEAL in parsed:
        broken = broken or not _is_sealed(content, end)
        del parsed[_SEAL]
    if broken:
        raise DamagedError(f"{where} is damaged: its seal is broken.")
    return parsed


def sealed_text(text: str) -> bytes:
    """A text that ends in an empty seal and what closes it, with the seal of all before it."""
    head, _, end = text.rpartition(f'"{_SEAL}": ""')
    return head.encode() + _frame(head.encode(), end.encode())


def seal_is_broken(content: bytes, end: bytes) -> bool:
    """Whether a text was sealed and is another now, be it in the seal's own name."""
    if _is_sealed(content, end):
        return False
    size = len(_frame(b"", end))
    named = f'"{_SEAL}"'.encode() in content[-2 * size :]
    return named or _hash(content[:-size]) in content[-size:]


def _is_sealed(content: bytes, end: bytes) -> bool:
    """Whether a text ends in the seal of all that comes before it."""
    size = len(_frame(b"", end))
    return content[-size:] == _frame(content[:-size], end)


def _frame(head: bytes, end: bytes) -> bytes:
    return f'"{_SEAL}": "'.encode() + _hash(head) + b'"' + end


def _hash(content: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(content).encode()


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    mode: int = 0o644,
) -> None:
    """Write tensors as safetensors, atomically and sealed."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    about = dict(metadata or {})
    with _replacing(path, mode) as temporary:
        try:
            sealed = json.dumps([_seal(whole, about), about], sort_keys=True)
            save_file(whole, temporary, {_SEALED: sealed})
        except SafetensorError as error:  # a full disk must look like one
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def tensors_to_bytes(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """What `save_tensors` would write, seal and all, in memory."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    about = dict(metadata or {})
    return save(whole, {_SEALED: json.dumps([_seal(whole, about), about], sort_keys=True)})


def read_tensors(path: Path, *, links: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What `save_tensors` wrote, tensors and metadata; damage is an error, and so is a link unless
    ``links`` are followed, as for a file that the user named.

    A file without a seal, made by others, is taken as it is.
    """
    with _telling(path), opened(path, links=links):  # its reader opens whatever has that name
        pass

    def read() -> tuple[dict[str, Tensor], dict[str, str]]:
        with named_in_utf8(path) as name, safe_open(name, framework="pt") as file:
            about = dict(file.metadata() or {})
            return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118

    return _intact(path, read)


def tensors_from_bytes(content: bytes, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What `read_tensors` would make of a file of this content, which is not at ``path``."""

    def read() -> tuple[dict[str, Tensor], dict[str, str]]:
        length = int.from_bytes(content[:8], "little")
        return load(content), dict(json.loads(content[8 : 8 + length]).get("__metadata__") or {})

    return _intact(path, read)


def _intact(
    path: Path, read: Callable[[], tuple[dict[str, Tensor], dict[str, str]]]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What is read, once its seal was looked at."""
    try:
        tensors, about = read()
        if _SEALED in about:
            seal, about = json.loads(about[_SEALED])
            intact = seal == _seal(tensors, about)
        else:  # a seal under another name has a damaged name
            intact = not any(_seals(text, tensors) for text in about.values())
    except FileNotFoundError:
        raise
    except Exception as error:  # whatever a parser makes of meaningless bytes
        raise DamagedError(f"'{path}' is damaged ({type(error).__name__}).") from error
    if not intact:
        raise DamagedError(f"'{path}' is damaged: its seal is broken.")
    return tensors, about


@contextmanager
def named_in_utf8(path: Path) -> Iterator[str]:
    """A name of a file that is text, for readers that take no other: its own, or that of the open
    file."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with open(path, "rb") as file:
            yield f"/dev/fd/{file.fileno()}"
    else:
        yield str(path)


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """XXH3 of names and numbers, at memory speed: it finds damage, and is for nothing else."""
    total = xxhash.xxh3_64()
    for name in sorted(tensors):
        total.update(name.encode())
        numbers = tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8)
        total.update(numbers.numpy().data)
    return total.hexdigest()


def _seal(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """A hash of everything in a file: types, shapes and metadata beside the numbers."""
    forms = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}
    rest = json.dumps([forms, dict(metadata)], sort_keys=True)
    return checksum(tensors) + xxhash.xxh3_64_hexdigest(rest.encode())


def _seals(text: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether an entry of a file's metadata is the seal of its tensors."""
    try:
        seal, about = json.loads(text)
        return bool(seal == _seal(tensors, dict(about)))
    except (ValueError, TypeError, RecursionError):  # whatever others wrote there
        return False

"""Files: written whole or not at all, and recognised when they are damaged.

Tensors carry a seal, a hash of everything in their file, so that damage is found on reading.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedsim.core.errors import DamagedError

UNFINISHED = ".unfinished-write"  # the suffix of a file while it is written
_SEALED = "sealed"  # one entry for seal and metadata: several would be written in any order


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write all of ``content`` or nothing: a reader never sees half a file."""
    with _replacing(path, mode) as temporary:
        temporary.write_bytes(content)


@contextmanager
def _replacing(path: Path, mode: int) -> Iterator[Path]:
    """A temporary file beside ``path`` that becomes it when all went well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any, mode: int = 0o644) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode(), mode)


def read_json(path: Path) -> Any:
    """What `write_json` wrote; damage is an error."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"'{path}' is damaged: not JSON.") from error


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


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What `save_tensors` wrote, tensors and metadata; damage is an error.

    A file without a seal, made by others, is taken as it is.
    """
    try:
        with named_in_utf8(path) as name, safe_open(name, framework="pt") as file:
            about = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        intact = True
        if _SEALED in about:
            seal, about = json.loads(about[_SEALED])
            intact = seal == _seal(tensors, about)
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

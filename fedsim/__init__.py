"""fedsim: a federated-learning testbed with an adversarial server.

run = fedsim.audit("spec.yaml", "train.rounds=5", output="runs/mine")
run.scores  # a DataFrame, one row per reconstructed image
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsim.captures.strategy import capture
    from fedsim.captures.witness import witness
    from fedsim.core.errors import FedsimError
    from fedsim.core.run import Run
    from fedsim.core.spec import Spec, load_spec
    from fedsim.lint import Lint

# In somebody else's app `import fedsim` costs nothing: these are imported when they are asked for.
_LATER = {
    "FedsimError": "fedsim.core.errors",
    "Run": "fedsim.core.run",
    "Spec": "fedsim.core.spec",
    "capture": "fedsim.captures.strategy",
    "load_spec": "fedsim.core.spec",
    "witness": "fedsim.captures.witness",
}

HERE = Path(__file__).parent
if not (HERE / "attacks").is_dir():  # Flower packs an app without its symbolic links
    __path__.append(str(HERE.parent))


def audit(
    spec: str | Path | Mapping[str, Any] | Spec = "",
    *overrides: str,
    output: str | Path | None = None,
    vaults: Iterable[str | Path] = (),
    trust: bool = False,
    **sections: Any,
) -> Run:
    """Rounds, attacks, scores, report; returns the finished run.

    ``spec`` is a YAML file, a mapping or a Spec; ``overrides`` are ``"key.sub=value"`` as on the
    command line, and keywords replace whole sections (``threat="B"``). In its place, the directory
    of an app that was captured: then there are no rounds to do, ``vaults`` are folders with what
    witnesses on other machines kept, and ``trust`` is for a capture that somebody else made.
    """
    if isinstance(spec, str | Path) and _is_directory(spec):
        from fedsim.audit.captured import audit_captured

        changes = [*overrides, *_as_yaml(sections)]
        folders = [Path(folder) for folder in vaults]
        return audit_captured(spec, None, changes, vaults=folders, output=output, trust=trust)
    from fedsim.audit.stages import audit as conduct

    checked = _spec(spec, overrides, sections)
    return conduct(checked, output or default_output(checked))


def run(
    spec: str | Path | Mapping[str, Any] | Spec = "",
    *overrides: str,
    output: str | Path | None = None,
    **sections: Any,
) -> Run:
    """The federated rounds and what the server saw of them, without attacks."""
    from fedsim.audit.stages import federate

    checked = _spec(spec, overrides, sections)
    return federate(checked, output or default_output(checked))


def lint(
    spec: str | Path | Mapping[str, Any] | Spec = "",
    *overrides: str,
    ignore: Iterable[str] = (),
    trust: bool = False,
    **sections: Any,
) -> Lint:
    """What is certain or likely to leak, found without running a round.

    Code that the spec names by import path is run only with ``trust``.
    """
    from fedsim.lint import lint as check

    return check(_spec(spec, overrides, sections), ignore, trust=trust)


def bench(
    spec: str | Path | Mapping[str, Any], *overrides: str, output: str | Path = "runs/bench"
) -> Any:
    """Attacks x defenses x strengths; returns the table as a DataFrame."""
    from fedsim.bench.cells import load_bench
    from fedsim.bench.measurement import conduct

    return conduct(load_bench(spec, overrides), output)


def default_output(spec: Spec) -> Path:
    """The directory of a run for which none was given."""
    return Path("runs") / f"{spec.name}-{spec.digest()}"


def _spec(
    source: str | Path | Mapping[str, Any] | Spec,
    overrides: tuple[str, ...],
    sections: Mapping[str, Any],
) -> Spec:
    from fedsim.core.spec import Spec, load_spec

    if isinstance(source, Spec):
        source = source.model_dump(mode="json")
    return load_spec(source or {}, [*overrides, *_as_yaml(sections)])


def _as_yaml(sections: Mapping[str, Any]) -> list[str]:
    """Whole sections as overrides."""
    import yaml
    from pydantic_core import to_jsonable_python

    return [f"{key}={yaml.safe_dump(to_jsonable_python(value))}" for key, value in sections.items()]


def _is_directory(source: str | Path) -> bool:
    """Whether this names a directory, here or of a capture elsewhere, and no spec."""
    from fedsim.captures.log import captured_elsewhere

    path = Path(source)
    if not str(source) or path.exists() or path.suffix:
        return bool(str(source)) and path.is_dir()
    return captured_elsewhere(str(source)) is not None


class _Package(ModuleType):
    """This package, some of whose functions share their name with a subpackage: importing
    `fedsim.audit.repair` must not replace the function `fedsim.audit` by the subpackage. The
    function stays, and the subpackage's contents are found through it."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and name in __all__:
            getattr(self, name).__dict__ = vars(value)
        else:
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'fedsim' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return value


__all__ = [
    "FedsimError",
    "Run",
    "Spec",
    "audit",
    "bench",
    "capture",
    "lint",
    "load_spec",
    "run",
    "witness",
]

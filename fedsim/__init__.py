"""fedsim: a federated-learning testbed with an adversarial server.

run = fedsim.audit("spec.yaml", "train.rounds=5", output="runs/mine")
run.scores  # a DataFrame, one row per reconstructed image
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedsim.core.cache import cache_folder

# Flower, Ray and torch read these when they are first imported, which is later: a testbed calls
# nobody, and leaves nothing outside its own folders.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("FLWR_HOME", str(cache_folder().absolute() / "flwr"))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder().absolute() / "torch"))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a call after shutdown starts no new Ray
# Some virtual machines announce AMX and die of its instructions, in bfloat16 on a CPU.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from fedsim.core.errors import FedsimError
from fedsim.core.run import Run
from fedsim.core.spec import Spec, load_spec

if TYPE_CHECKING:
    from fedsim.lint import Lint

HERE = Path(__file__).parent
if not (HERE / "attacks").is_dir():  # Flower packs an app without its symbolic links
    __path__.append(str(HERE.parent))


def audit(
    spec: str | Path | Mapping[str, Any] | Spec = "",
    *overrides: str,
    output: str | Path | None = None,
    **sections: Any,
) -> Run:
    """Rounds, attacks, scores, report; returns the finished run.

    ``spec`` is a YAML file, a mapping or a Spec; ``overrides`` are ``"key.sub=value"`` as on the
    command line, and keywords replace whole sections (``threat="B"``).
    """
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
    import yaml
    from pydantic_core import to_jsonable_python

    if isinstance(source, Spec):
        source = source.model_dump(mode="json")
    as_yaml = [
        f"{key}={yaml.safe_dump(to_jsonable_python(value))}" for key, value in sections.items()
    ]
    return load_spec(source or {}, [*overrides, *as_yaml])


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

__all__ = ["FedsimError", "Run", "Spec", "audit", "bench", "lint", "load_spec", "run"]

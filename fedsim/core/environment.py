"""Environment: what Flower, Ray and torch read of it when they are first imported.

A testbed calls nobody, and leaves nothing outside its own folders. The rooms that start Flower or
Ray import this module first, which sets it. `import fedsim` alone says nothing: in somebody else's
app, Flower's home, its telemetry and torch's instructions are theirs to choose.
"""

from __future__ import annotations

import os

from fedsim.core.cache import cache_folder


def keep_to_ourselves() -> None:
    """Set what is not set: no telemetry, no look for updates, caches in fedsim's own folder."""
    folder = cache_folder().absolute()
    wanted = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(folder / "flwr"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_ENABLE_AUTO_CONNECT": "0",  # a call after shutdown starts no new Ray
        # Some virtual machines announce AMX and die of its instructions, in bfloat16 on a CPU.
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
    }
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


keep_to_ourselves()

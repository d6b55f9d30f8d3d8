"""Cost: what a defense takes from a federation beside the leakage that it stops."""

from __future__ import annotations

from fedsim.core.observation import read_observation
from fedsim.core.run import Run, list_observations
from fedsim.defenses.applied import declared


def upload_bytes(run: Run) -> int | None:
    """One upload, written as tightly as the defenses allow; None where guards let none go."""
    if not (observed := list_observations(run.observations)):
        return None
    update = read_observation(observed[-1]).update
    sizes = [defense.encoded_bytes(update) for defense in declared(run.spec.defenses)]
    return min([update.nbytes(), *[size for size in sizes if size is not None]])

"""A real deployment: SuperLink and SuperNodes of Flower, their certificates and keys, and the apps
that they run."""

from __future__ import annotations

import fedsim.core.environment  # noqa: F401  before Flower or Ray is imported
from fedsim.deploy.deployment import carry_out, register, set_up, submit
from fedsim.deploy.keys import check_keys, make_keys
from fedsim.deploy.scorer import gather

__all__ = ["carry_out", "check_keys", "gather", "make_keys", "register", "set_up", "submit"]

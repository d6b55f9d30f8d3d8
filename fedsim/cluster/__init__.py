"""The cluster: a Ray to work on, near or far. Its modules are what it offers: the `session` of a
run, a `local` cluster that stays up on this machine, the token it asks for (`authentication`), and
the `processes` behind it."""

import fedsim.core.environment  # noqa: F401  before Ray is imported

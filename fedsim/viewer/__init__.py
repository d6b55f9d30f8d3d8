"""The viewer: run directories in a browser, live and side by side, on this machine alone.

It reads the files of the runs and nothing else, so it can look at any run of any process: one that
is being written, one of last month, one that is damaged. It imports nothing that a spec names.
"""

from __future__ import annotations

from fedsim.viewer.server import serve

__all__ = ["serve"]

"""The run of the manifest that `swarm manifest` prints."""

from __future__ import annotations

from peers.programs.manifest import EXAMPLE
from swarm.manifest import Run, parse_run


def example_run() -> Run:
    """The run of `EXAMPLE`."""
    return parse_run(EXAMPLE)

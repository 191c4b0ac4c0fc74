"""What Python programs and notebooks call: a run, its training on this machine, its reference, joining one.

`swarm` offers these names as its own. The commands stand on the same pieces. A name's module is imported when
it is asked for: who describes a run needs none of the network.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peers.api.joining import join, join_async
    from peers.api.local_swarm import LocalSwarm, local
    from peers.api.run import Run
    from peers.api.steps import Reference, Step, reference

__all__ = ("LocalSwarm", "Reference", "Run", "Step", "join", "join_async", "local", "reference")
_MODULES = {"join": "joining", "join_async": "joining", "LocalSwarm": "local_swarm", "local": "local_swarm"}
_MODULES |= {"Run": "run", "Reference": "steps", "Step": "steps", "reference": "steps"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

"""What Python programs and notebooks call: a run, its training on this machine, its reference, joining one.

`swarm` offers these names as its own. The commands stand on the same pieces.
"""

from peers.api.joining import join, join_async
from peers.api.local_swarm import LocalSwarm, local
from peers.api.run import Run
from peers.api.steps import Reference, Step, reference

__all__ = ("LocalSwarm", "Reference", "Run", "Step", "join", "join_async", "local", "reference")

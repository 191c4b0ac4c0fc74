"""Named moments at which a test may ask a process to kill itself.

`SWARM_KILL_AT=name[:n][,name[:n]…]` kills the process with SIGKILL the n-th time (default 1st) that it
passes the point `name`. Unset, a point costs one dictionary look-up.

    forward    a microbatch's forward is done, the next stage is not called yet
    backward   the gradient came back, its backward has not run
    reduce     this member has sent or received a chunk of an all-reduce
    prepared   the reduced gradient is held, the step not taken
    joining    the state of another peer is half downloaded
    trainer    a trainer has a microbatch in flight
"""

from __future__ import annotations

import os
import signal

_wishes = [item.partition(":") for item in os.environ.get("SWARM_KILL_AT", "").split(",") if item]
_left: dict[str, int] = {name: int(count or 1) for name, _, count in _wishes}


def fault_point(name: str) -> None:
    """Pass the point `name`."""
    if name in _left:
        _left[name] -= 1
        if _left[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

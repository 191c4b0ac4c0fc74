"""Faults that a test may ask a process for, through its environment. Unset, they cost a dictionary look-up.

`SWARM_KILL_AT=name[:n][,name[:n]…]` kills the process with SIGKILL the n-th time (default 1st) that it
passes the point `name`; `SWARM_STOP_AT` stops it there with SIGSTOP.

    forward    a microbatch's forward is done, the next stage is not called yet
    backward   the gradient came back, its backward has not run
    reduce     this member has sent or received a chunk of an all-reduce
    prepared   the reduced gradient is held, the step not taken
    joining    the state of another peer is half downloaded
    trainer    a trainer has a microbatch in flight

`SWARM_JOB_S=seconds` makes each forward and backward take at least so long: a slow device that burns nothing.
"""

from __future__ import annotations

import os
import signal
import time

_JOB_S = float(os.environ.get("SWARM_JOB_S") or 0.0)


def _wishes(variable: str) -> dict[str, int]:
    items = [item.partition(":") for item in os.environ.get(variable, "").split(",") if item]
    return {name: int(count or 1) for name, _, count in items}


_left = [(signal.SIGKILL, _wishes("SWARM_KILL_AT")), (signal.SIGSTOP, _wishes("SWARM_STOP_AT"))]


def fault_point(name: str) -> None:
    """Pass the point `name`."""
    for signum, left in _left:
        if name in left:
            left[name] -= 1
            if left[name] == 0:
                os.kill(os.getpid(), signum)


def job_point(began: float) -> None:
    """A forward or backward, begun at `began` (time.perf_counter), is done. On the device thread."""
    if _JOB_S:
        time.sleep(max(0.0, began + _JOB_S - time.perf_counter()))

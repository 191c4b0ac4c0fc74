"""Faults that a test may ask a process for, through its environment. Unset, they cost a dictionary look-up.

`SWARM_KILL_AT=name[:n][,name[:n]…]` kills the process with SIGKILL the n-th time (default 1st) that it
passes the point `name`:

    forward    a microbatch's forward is done, the next stage is not called yet
    backward   the gradient came back, its backward has not run
    reduce     this member has sent or received a chunk of an all-reduce
    prepared   the reduced gradient is held, the step not taken
    joining    the state of another peer is half downloaded
    trainer    a trainer has a microbatch in flight
    frozen     this member's sum is frozen for a reduce
    took       this member has taken a step, and said nothing of it yet
    leaving    a member that leaves has finished what it does for others, and has not said that it goes
    meeting    islands are to meet, and what this one has changed is not encoded yet
    encoded    it is, and no other peer has it
    given      another replica asked for it, and is not told yet where to get it
    gathered   what another island has changed is here, or its sum of a part
    summed     this island's sum of a part is made, and no other peer has it
    kept       a version is kept in memory: for islands that are lost, and for keepers

A simulation, in which a process is no process of the system, is told of each point instead: `on_point`.

`SWARM_JOB_S=seconds` makes each forward and backward take at least so long: a slow device that burns nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

on_point: Callable[[str], None] | None = None

_JOB_S = float(os.environ.get("SWARM_JOB_S") or 0.0)


_asked = [item.partition(":") for item in os.environ.get("SWARM_KILL_AT", "").split(",") if item]
_left = {name: int(count or 1) for name, _, count in _asked}


def fault_point(name: str) -> None:
    """Pass the point `name`."""
    if on_point is not None:
        on_point(name)
    if name in _left:
        _left[name] -= 1
        if _left[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def job_point(took_s: float) -> None:
    """A forward or backward is done, and took so long. In the job itself."""
    if _JOB_S:
        time.sleep(max(0.0, _JOB_S - took_s))

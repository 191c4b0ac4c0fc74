"""Stop a process, and wait until it really does nothing more."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

LIMIT_S = 10.0


def stop(pid: int) -> None:
    """Send SIGSTOP and return when every thread of the process is stopped.

    `os.kill` returns before the other process notices: on a busy machine it can still answer a call or two.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + LIMIT_S
    while not all(_state(task) in "Tt" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    """The letter of one thread's state; a thread that has just ended does nothing more either."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"

"""What time it is: monotonic seconds for waits and durations, Unix seconds for what others are told.

The protocol asks here only. A loop that is a `VirtualTime` (`peers.sim.loop`) answers both itself, so that
whole swarms run in virtual time; anywhere else it is the system's clock.

`loop.time()` is not used outside virtual time. uvloop's has a resolution of a millisecond and stands still
within one round of the loop, too coarse for bandwidths and the durations of small microbatches, and no other
thread may ask for it. It is the same clock otherwise, so the two can be compared.
"""

from __future__ import annotations

import asyncio
import time


class VirtualTime:
    """A loop that moves its clock instead of waiting.

    Not an ABC: whether a loop is one is asked whenever the time is, and an ABC is slow to answer that.
    """

    def time(self) -> float:
        """Monotonic seconds."""
        raise NotImplementedError

    def unix_s(self) -> float:
        """Unix seconds, which move with `time`."""
        raise NotImplementedError


def now_s() -> float:
    """Monotonic seconds."""
    loop = asyncio._get_running_loop()  # None in another thread, and before the loop runs
    return loop.time() if isinstance(loop, VirtualTime) else time.monotonic()


def unix_s() -> float:
    """Unix seconds."""
    loop = asyncio._get_running_loop()
    return loop.unix_s() if isinstance(loop, VirtualTime) else time.time()


def is_virtual() -> bool:
    """Whether the running loop moves its clock instead of waiting; it runs no threads then."""
    return isinstance(asyncio._get_running_loop(), VirtualTime)

"""A call that takes much longer than usual is made once more, to another peer: the first answer is taken."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from peers.clock import now_s
from peers.waiting import let_go
from swarm.errors import PeerFault, PeerSilent
from swarm.ids import PeerId, Stage
from swarm.policy.router import Router
from swarm.policy.timeouts import CallLimits

T = TypeVar("T")
MOMENT_S = 0.001
"""What is left after rounding may be too short for a clock to move."""


class Overtaking:
    """The calls of one peer to those of a stage.

    Both may have counted a microbatch then, as when a call has ended that was answered too late: the stage
    undoes one of them. If another one is quick, neither what is behind the late one is slow, nor this peer's
    line: so that one alone is charged.
    """

    def __init__(
        self, router: Router, stage: Stage, limits: CallLimits, on_fault: Callable[[PeerFault], None]
    ) -> None:
        self._router, self._stage, self._limits, self._on_fault = router, stage, limits, on_fault
        self._turn = asyncio.Lock()
        """One peer at a time is overtaken: if all become slow, that makes them little slower."""

    async def unless_late(
        self, peer: PeerId, t: int, asked: Coroutine[Any, Any, T],
        again: Callable[[], Coroutine[Any, Any, T]], opened_s: Callable[[], float] = lambda: 0.0,
    ) -> T:  # fmt: skip
        """What `peer` was `asked` in step `t`, or the same of another one, `again`, if that is sooner.

        `opened_s`: since when there is something to answer; infinity: not yet.
        """
        if (limit_s := self._limits.late_after_s(peer, t=t)) == math.inf:
            return await asked
        began, first, second = now_s(), asyncio.ensure_future(asked), None

        def late_s() -> float:
            return now_s() - max(began, opened_s())

        async def overtake() -> T:
            since_s = now_s()
            found = await again()
            if not first.done() and self._limits.is_soon(now_s() - since_s):
                self._note_overtaken(peer, t, late_s())
            return found

        async def another() -> T:
            async with self._turn:
                if not self._router.backoff.is_failing(peer):
                    return await overtake()
            return await overtake()

        try:
            while not first.done() and (late := late_s()) < limit_s:
                await asyncio.wait({first}, timeout=max(MOMENT_S, limit_s - max(0.0, late)))
            if not first.done():
                second = asyncio.ensure_future(another())
                await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            if second is None or first.done() or second.exception():
                return await first
            return second.result()
        finally:
            let_go(*(task for task in (first, second) if task))

    def _note_overtaken(self, peer: PeerId, t: int, late_s: float) -> None:
        """The second time in some steps it is taken for one that does not answer."""
        now = now_s()
        silent = self._limits.overtaken(peer, t=t, since_s=now - late_s, now=now)
        self._router.failed(peer, now=now, silent=silent)
        self._on_fault(PeerSilent(peer, f"had not answered after {late_s:.1f} s, and another one had"))
